"""A model and its tokenizer as transformers load them; what goes wrong there, in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from lade.cli.loading import checkpoint
from lade.cli.loading.hub import Source, gated
from lade.cli.loading.quantization import quantization_config
from lade.cli.options.model import Loading
from lade.cli.terminal import one_line
from lade.errors import ConfigError, InputError

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
