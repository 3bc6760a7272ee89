"""Model, tokenizer, processor, adapter and quantization, loaded by transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from lade.cli.loading import checkpoint
from lade.cli.loading.hub import Source, find_adapter, gated
from lade.cli.options.model import Loading
from lade.cli.terminal import one_line
from lade.errors import ConfigError, InputError


@dataclass(frozen=True)
class Scheme:
    """One way to quantise.

    Attributes:
        package: what pip calls the library that does it.
        module: what Python calls it.
        config: makes transformers' config for it; the library is imported only then.
    """

    package: str
    module: str
    config: Callable[[], Any]

    @property
    def installed(self) -> bool:
        """Whether the library is there."""
        try:
            return find_spec(self.module) is not None
        except ModuleNotFoundError:  # of a package that the module would be in
            return False


def _torchao(name: str, **fields: Any) -> Scheme:
    def config() -> Any:
        return transformers.TorchAoConfig(getattr(import_module("torchao.quantization"), name)(**fields))

    return Scheme("torchao", "torchao", config)


def _bitsandbytes(**fields: Any) -> Scheme:
    return Scheme("bitsandbytes", "bitsandbytes", lambda: transformers.BitsAndBytesConfig(**fields))


def _quanto(weights: str) -> Scheme:
    return Scheme("optimum-quanto", "optimum.quanto", lambda: transformers.QuantoConfig(weights=weights))


SCHEMES = {
    "bnb-4bit": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
    "bnb-8bit": _bitsandbytes(load_in_8bit=True),
    "quanto-int4": _quanto("int4"),
    "quanto-int8": _quanto("int8"),
    "torchao-float8": _torchao("Float8WeightOnlyConfig"),
    "torchao-int8": _torchao("Int8WeightOnlyConfig"),
}


def quantization_config(name: str) -> Any:
    """What `from_pretrained` takes as `quantization_config` for a scheme.

    Raises:
        ConfigError: there is no such scheme, or its library is not installed or cannot be imported.
    """
    scheme = SCHEMES.get(name)
    if scheme is None:
        here = ", ".join(each for each, scheme in SCHEMES.items() if scheme.installed) or "none"
        raise ConfigError("quantization", name, f"give one of {', '.join(SCHEMES)}; installed here: {here}")
    remedy = f"it takes {scheme.package}: run  pip install accelerate {scheme.package}"
    if not scheme.installed or find_spec("accelerate") is None:
        raise ConfigError("quantization", name, remedy)
    try:
        return scheme.config()
    except ImportError as problem:
        raise ConfigError("quantization", name, f"{problem}; {remedy}") from problem


def put_adapter(model: Any, loading: Loading, source: Source) -> None:
    """Put the adapter that was asked for into a model; its weights stay apart, so that it computes what PEFT does.

    Args:
        model: is changed.
        loading: which adapter.
        source: of the model.

    Raises:
        ConfigError, InputError: there is no such adapter, it is none for this model, or PEFT is not installed.
    """
    adapter = loading.adapter
    if find_spec("peft") is None:
        raise ConfigError("adapter", adapter, "it takes PEFT: run  pip install peft")
    where = find_adapter(loading)
    hub = {name: value for name, value in loading.hub.items() if name != "revision"}  # which is the model's
    remedy = "give an adapter's folder, and the --model that it was made for"
    try:
        found = model.load_adapter(where.name, adapter_kwargs={**hub, "local_files_only": where.local})
    except Exception as problem:
        reason = f"it cannot be put into {source.shown!r} ({one_line(problem, 240)})"
        raise ConfigError("adapter", adapter, f"{reason}: {remedy}") from problem
    wrong = sorted([*found.missing_keys, *found.unexpected_keys])
    if wrong:
        reason = f"its weights are not those of an adapter for {source.shown!r} (first {wrong[0]})"
        raise ConfigError("adapter", adapter, f"{reason}: {remedy}")


def load_processor(source: Source, loading: Loading) -> Any:
    """Load it.

    Raises:
        InputError: Pillow is missing, or the checkpoint has none that can be loaded.
    """
    if find_spec("PIL") is None:
        raise InputError("images cannot be read without Pillow: run  pip install pillow")
    try:
        processor = AutoProcessor.from_pretrained(
            source.name, local_files_only=source.local, trust_remote_code=loading.trust_remote_code, **loading.hub
        )
    except Exception as problem:
        missing = "torchvision" in str(problem) and find_spec("torchvision") is None
        remedy = "run  pip install torchvision" if missing else "give a checkpoint with its preprocessor_config.json"
        reason = one_line(str(problem).strip().split("\n", 1)[0], 200)
        raise InputError(f"model {source.shown!r}: its processor cannot be loaded ({reason}): {remedy}") from problem
    if isinstance(processor, PreTrainedTokenizerBase):
        raise InputError(f"model {source.shown!r} has no processor, so it takes no images: leave them out")
    if not getattr(processor, "chat_template", None):
        raise InputError(f"the processor of {source.shown!r} has no chat template, so images have no place in a prompt")
    return processor


_UNKNOWN_CLASS = "Unrecognized configuration class"


def load_tokenizer(source: Source, loading: Loading) -> Any:
    """The tokenizer of a model.

    Raises:
        InputError: it cannot be loaded, or is empty.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.name, local_files_only=source.local, trust_remote_code=loading.trust_remote_code, **loading.hub
        )
    except Exception as problem:
        raise InputError(_explain(source, "its tokenizer cannot be loaded", problem)) from problem
    if not len(tokenizer):
        remedy = "put the model's tokenizer.json beside it"
        raise InputError(f"model {source.shown!r}: its tokenizer has no vocabulary; {remedy}")
    return tokenizer


def load_model(
    source: Source, loading: Loading, target: torch.device | None, images: bool | None, processes: int = 1
) -> Any:
    """The model on its device, or spread over several.

    Args:
        source: of its files.
        loading: how to load it.
        target: its device; None where a map or a split says where.
        images: whether it is to take images; None: if it can.
        processes: over how many of them to split its layers.

    Raises:
        ConfigError: an option does not fit the model.
        InputError: it cannot be loaded, lacks weights, or does not fit on the device.
    """
    arguments = _arguments(loading, target)
    if processes > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        arguments["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=processes)
    try:
        model, found = _first_that_fits(
            _classes(images), source.name, local_files_only=source.local, **arguments, **loading.hub
        )
    except Exception as problem:
        if images and _UNKNOWN_CLASS in str(problem):
            raise InputError(f"model {source.shown!r} takes no images: leave them out") from problem
        raise _blamed(problem, loading) or InputError(_explain(source, "it cannot be loaded", problem)) from problem
    missing = sorted(found["missing_keys"])
    if missing:
        raise InputError(
            f"model {source.shown!r} lacks {len(missing)} of the weights of a {type(model).__name__} (first "
            f"{missing[0]}): give a complete checkpoint of a causal language model"
        )
    if "device_map" in arguments or processes > 1:
        return model
    try:
        return model.to(target)
    except Exception as problem:
        raise InputError(
            f"model {source.shown!r} does not fit on device {loading.device!r}: {one_line(problem)}"
        ) from problem


def _classes(images: bool | None) -> list[Any]:
    """The auto classes to try. Some multimodal checkpoints are known to the second one only, also for text."""
    if images:
        return [AutoModelForImageTextToText]
    classes = [AutoModelForCausalLM, AutoModelForImageTextToText]
    return classes if images is False else classes[::-1]


def _first_that_fits(classes: Sequence[Any], name: str, **arguments: Any) -> Any:
    """The model, and what loading it found, by the first class that knows its configuration."""
    *others, last = classes
    for each in others:
        try:
            return each.from_pretrained(name, output_loading_info=True, **arguments)
        except ValueError as problem:
            if _UNKNOWN_CLASS not in str(problem):
                raise
    return last.from_pretrained(name, output_loading_info=True, **arguments)


def _arguments(loading: Loading, target: torch.device | None) -> dict[str, Any]:
    """What `from_pretrained` is given besides where from."""
    arguments: dict[str, Any] = {"dtype": _dtype(loading), "trust_remote_code": loading.trust_remote_code}
    if loading.attn_implementation is not None:
        arguments["attn_implementation"] = loading.attn_implementation
    if loading.device_map is not None:
        arguments["device_map"] = _device_map(loading.device_map)
    if loading.quantization is not None:
        arguments["quantization_config"] = quantization_config(loading.quantization)
        arguments.setdefault("device_map", {"": target})  # quantised weights are not to be moved afterwards
    return arguments


def _device_map(text: str) -> Any:
    """What stands for it in `from_pretrained`: a word, or an object that was written as JSON."""
    if find_spec("accelerate") is None:
        raise ConfigError("device-map", text, "it takes accelerate: run  pip install accelerate")
    if not text.lstrip().startswith("{"):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError("device-map", one_line(text, 60), f"it is no JSON ({one_line(problem, 120)})") from problem
    if not found:
        raise ConfigError("device-map", text, 'it says nothing: give auto, or an object such as {"": "cpu"}')
    return found


def _dtype(loading: Loading) -> torch.dtype | str:
    if loading.dtype == "auto":
        # The embedded weights are stored in bfloat16 to be small; where near ties do not round apart, texts are equal.
        return torch.float32 if loading.model is None else "auto"
    dtype: torch.dtype = getattr(torch, loading.torch_dtype)
    return dtype


def _blamed(problem: Exception, loading: Loading) -> ConfigError | None:
    """An error of `from_pretrained` as one of the option that it is about."""
    reason, name = one_line(problem, 200), loading.attn_implementation
    if name is not None and any(word in reason.lower() for word in ("attention", "attn", "kernel")):
        return ConfigError("attn-implementation", name, f"{reason}; give sdpa or eager, or leave it out")
    if loading.device_map is not None and "device" in reason:
        return ConfigError("device-map", loading.device_map, f"{reason}; give auto, or leave it out")
    if loading.quantization is not None:
        return ConfigError("quantization", loading.quantization, f"the model cannot be loaded with it: {reason}")
    return None


def _explain(source: Source, what: str, problem: Exception) -> str:
    """One line for what transformers or safetensors raised."""
    reason = str(problem)
    if _UNKNOWN_CLASS in reason:
        found = re.search(r"(\w+)Config'?>", reason)
        kind = f"a {found[1]} model" if found else "something else"
        return f"model {source.shown!r} is {kind}, not a causal language model: give a decoder-only checkpoint"
    if known := checkpoint.why_not_loaded(source.name, problem):
        return f"model {source.shown!r}: {known}"
    if "access a gated repo" in reason:
        return gated(source.shown)
    if "trust_remote_code" in reason:
        return f"model {source.shown!r} runs Python code of its own: read that first, then add --trust-remote-code"
    first = one_line(reason.split("\n", 1)[0] or type(problem).__name__, 240).rstrip(".:")
    return f"model {source.shown!r}: {what} ({first}); check that its files are complete"
