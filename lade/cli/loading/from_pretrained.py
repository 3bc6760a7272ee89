"""Resolution of model names, and models, tokenizers, processors, adapters and quantization by transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerBase,
    QuantoConfig,
    TorchAoConfig,
)
from transformers.utils import logging as untyped_logging

from lade import ConfigError, InputError, machine
from lade.cli.options.model import EMBEDDED, Loading, folder_of
from lade.cli.terminal import Terminal, one_line

logging: Any = untyped_logging
_SILENT = 50  # logging.CRITICAL


@contextmanager
def downloading(term: Terminal) -> Iterator[None]:
    """Show the hub's download bars and transformers' loading bars, and suspend the status line."""
    term.status.hold(True)
    logging.enable_progress_bar()
    try:
        yield
    finally:
        logging.disable_progress_bar()
        term.status.hold(False)


@contextmanager
def quiet() -> Iterator[None]:
    """Switch off transformers' progress bars and advice, and restore them afterwards."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(_SILENT)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


_TIMEOUT_S = 5.0
_HUB_ID = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ModelSource:
    """Arguments of `from_pretrained` for a model."""

    shown: str  # name as the user gave it
    name: str  # path, or hub id
    local: bool  # do not access the network
    download: bool = False  # the weights have yet to be downloaded
    stored: Literal["gguf", "packed"] | None = None  # see `machine.stored_as`


def find(loading: Loading) -> ModelSource:
    """Return where to load a model from; raises if it is neither here nor on the hub, or that cannot be reached."""
    name = loading.model
    if name is None:
        from lade.embedded import model_path

        return ModelSource(EMBEDDED, str(model_path()), local=True)
    folder = folder_of(name)
    stored = machine.stored_as(folder)
    if stored == "gguf" or folder.is_dir():
        if stored != "gguf" and not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise InputError(f"model folder {name!r} has no config.json: give a folder that save_pretrained wrote")
        if loading.revision is not None:
            raise ConfigError("revision", loading.revision, f"{name!r} is here, and has no revisions")
        return ModelSource(name, str(folder), local=True, stored=stored)
    if folder.exists():
        raise InputError(f"model {name!r} is a file, and not a .gguf: give its folder")
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"model folder {name!r} does not exist: check the path, or give a hub id such as org/name")
    if loading.local_files_only:
        if _cached("config.json", loading) is None:
            raise InputError(f"model {name!r} has not been downloaded yet: leave out --local-files-only")
        return ModelSource(name, name, local=True)
    commit = _commit(loading)
    return ModelSource(
        name, name, local=commit is None, download=commit is not None and not _has_weights(loading, commit)
    )


def find_adapter(loading: Loading) -> ModelSource:
    """Return where to load the adapter from; errors as in `find`."""
    name = loading.adapter or ""
    folder = folder_of(name)
    if folder.is_dir():
        return ModelSource(name, str(folder), local=True)
    if folder.exists() or not _HUB_ID.fullmatch(name):
        raise ConfigError("adapter", name, "no such folder: check the path, or give a hub id such as org/name")
    if loading.local_files_only:
        return ModelSource(name, name, local=True)
    return ModelSource(name, name, local=_commit(loading.for_model(name), file="adapter_config.json") is None)


def _cached(file: str, loading: Loading, commit: str | None = None) -> Path | None:
    """Return the cached copy of a file of the model; None without one."""
    revision = commit or loading.revision
    found = try_to_load_from_cache(loading.name, file, cache_dir=loading.cache_dir, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _has_weights(loading: Loading, commit: str) -> bool:
    """Return True if all weights of a commit are cached."""
    index = _cached("model.safetensors.index.json", loading, commit)
    files = ["model.safetensors"]
    if index is not None:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return all(_cached(file, loading, commit) is not None for file in files)


def _commit(loading: Loading, file: str = "config.json") -> str | None:
    """Return the commit on the hub, asked once without retries; None if only a cached copy with `file` is left."""
    name, revision = loading.name, loading.revision
    try:
        commit: str = HfApi(token=loading.token).model_info(name, revision=revision, timeout=_TIMEOUT_S).sha or ""
    except GatedRepoError as problem:  # a subclass of RepositoryNotFoundError
        raise InputError(gated(name)) from problem
    except RevisionNotFoundError as problem:
        remedy = f"{name!r} has no such branch, tag or commit"
        raise ConfigError("revision", revision, remedy) from problem
    except (RepositoryNotFoundError, HFValidationError) as problem:
        raise InputError(f"model {name!r} is neither a folder here nor a model on the hub: check the name") from problem
    except Exception as problem:
        if _cached(file, loading) is not None:
            return None
        raise InputError(
            f"model {name!r} is not a folder here, and the hub cannot be reached ({one_line(problem, 120)}): "
            "check the network, or give a folder"
        ) from problem
    return commit


def gated(name: str) -> str:
    """Return the message for a gated model."""
    return f"model {name!r} is gated on the hub: accept its terms there, then log in with hf auth login, or add --token"


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme, by a library with one name for pip and one for Python."""

    package: str
    module: str
    config: Callable[[], Any]  # returns transformers' configuration; imports the library only then

    @property
    def installed(self) -> bool:
        """True if the library is installed, as far as can be told without importing it."""
        return find_spec(self.module.partition(".")[0]) is not None


def _torchao(name: str) -> Any:
    return TorchAoConfig(getattr(import_module("torchao.quantization"), name)())


_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
SCHEMES = {
    "bnb-4bit": Scheme("bitsandbytes", "bitsandbytes", lambda: BitsAndBytesConfig(**_NF4)),
    "bnb-8bit": Scheme("bitsandbytes", "bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "quanto-int4": Scheme("optimum-quanto", "optimum.quanto", lambda: QuantoConfig(weights="int4")),
    "quanto-int8": Scheme("optimum-quanto", "optimum.quanto", lambda: QuantoConfig(weights="int8")),
    "torchao-float8": Scheme("torchao", "torchao", lambda: _torchao("Float8WeightOnlyConfig")),
    "torchao-int8": Scheme("torchao", "torchao", lambda: _torchao("Int8WeightOnlyConfig")),
}


def quantization_config(name: str) -> Any:
    """Return `quantization_config` of `from_pretrained` for a scheme, whose library has to be installed."""
    scheme = SCHEMES.get(name)
    if scheme is None:
        here = ", ".join(each for each, scheme in SCHEMES.items() if scheme.installed) or "none"
        raise ConfigError("quantization", name, f"give one of {', '.join(SCHEMES)}; installed here: {here}")
    remedy = f"needs {scheme.package}: run  pip install accelerate {scheme.package}"
    if not scheme.installed or find_spec("accelerate") is None:
        raise ConfigError("quantization", name, remedy)
    try:
        return scheme.config()
    except ImportError as problem:
        raise ConfigError("quantization", name, f"{problem}; {remedy}") from problem


def put_adapter(model: Any, loading: Loading, source: ModelSource) -> None:
    """Load the adapter into a model, its weights unmerged, so that results equal PEFT's."""
    adapter = loading.adapter
    if find_spec("peft") is None:
        raise ConfigError("adapter", adapter, "needs PEFT: run  pip install peft")
    where = find_adapter(loading)
    hub = {name: value for name, value in loading.hub.items() if name != "revision"}  # it is the model's
    remedy = "give an adapter of this --model"
    try:
        found = model.load_adapter(where.name, adapter_kwargs={**hub, "local_files_only": where.local})
    except Exception as problem:
        reason = f"cannot be loaded into {source.shown!r} ({one_line(problem, 240)})"
        raise ConfigError("adapter", adapter, f"{reason}: {remedy}") from problem
    wrong = sorted([*found.missing_keys, *found.unexpected_keys])
    if wrong:
        reason = f"its weights do not fit {source.shown!r} (first {wrong[0]})"
        raise ConfigError("adapter", adapter, f"{reason}: {remedy}")


def load_processor(source: ModelSource, loading: Loading) -> Any:
    """Load the processor of a model, which prepares images; raises `InputError` where there is no usable one."""
    if find_spec("PIL") is None:
        raise InputError("images need Pillow: run  pip install pillow")
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
        raise InputError(f"model {source.shown!r} takes no images, as it has no processor")
    if not getattr(processor, "chat_template", None):
        raise InputError(f"model {source.shown!r}: its processor has no chat template, which images need")
    return processor


_UNKNOWN_CLASS = "Unrecognized configuration class"


def load_tokenizer(source: ModelSource, loading: Loading) -> Any:
    """Load the tokenizer of a model; raises `InputError` if that fails, or it has no vocabulary."""
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
    source: ModelSource, loading: Loading, target: torch.device | None, images: bool | None, processes: int = 1
) -> Any:
    """Load a model onto its device, or onto several: those of `device_map`, or of the processes.

    With `images` the class that takes images is loaded; for None, if there is one.
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
            raise InputError(f"model {source.shown!r} takes no images") from problem
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
    """Return the auto classes to try; some multimodal checkpoints are registered with the second alone."""
    if images:
        return [AutoModelForImageTextToText]
    classes = [AutoModelForCausalLM, AutoModelForImageTextToText]
    return classes if images is False else classes[::-1]


def _first_that_fits(classes: Sequence[Any], name: str, **arguments: Any) -> Any:
    """Load with the first class that knows the configuration; return the model and its loading info."""
    *others, last = classes
    for each in others:
        try:
            return each.from_pretrained(name, output_loading_info=True, **arguments)
        except ValueError as problem:
            if _UNKNOWN_CLASS not in str(problem):
                raise
    return last.from_pretrained(name, output_loading_info=True, **arguments)


def _arguments(loading: Loading, target: torch.device | None) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that do not say where to load from."""
    arguments: dict[str, Any] = {"dtype": _dtype(loading), "trust_remote_code": loading.trust_remote_code}
    if loading.attn_implementation is not None:
        arguments["attn_implementation"] = loading.attn_implementation
    if loading.device_map is not None:
        arguments["device_map"] = _device_map(loading.device_map)
    if loading.quantization is not None:
        arguments["quantization_config"] = quantization_config(loading.quantization)
        arguments.setdefault("device_map", {"": target})  # quantized weights cannot be moved afterwards
    return arguments


def _device_map(text: str) -> Any:
    """Return `device_map` for `from_pretrained`: a word, or a parsed JSON object."""
    if find_spec("accelerate") is None:
        raise ConfigError("device-map", text, "needs accelerate: run  pip install accelerate")
    if not text.lstrip().startswith("{"):
        return text
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ConfigError("device-map", one_line(text, 60), f"not JSON ({one_line(problem, 120)})") from problem
    if not found:
        raise ConfigError("device-map", text, 'give auto, or an object such as {"": "cpu"}')
    return found


def _dtype(loading: Loading) -> torch.dtype | str:
    if loading.dtype == "auto":
        # The embedded weights are stored in bfloat16 to be small; float32 decodes them without near ties.
        return torch.float32 if loading.model is None else "auto"
    dtype: torch.dtype = getattr(torch, loading.torch_dtype)
    return dtype


def _blamed(problem: Exception, loading: Loading) -> ConfigError | None:
    """Return an error of `from_pretrained` as one of the option that caused it; None if there is none."""
    reason, name = one_line(problem, 200), loading.attn_implementation
    if name is not None and any(word in reason.lower() for word in ("attention", "attn", "kernel")):
        return ConfigError("attn-implementation", name, f"{reason}; give sdpa or eager")
    if loading.device_map is not None and "device" in reason:
        return ConfigError("device-map", loading.device_map, f"{reason}; give auto")
    if loading.quantization is not None:
        return ConfigError("quantization", loading.quantization, f"the model cannot be loaded: {reason}")
    return None


def _explain(source: ModelSource, what: str, problem: Exception) -> str:
    """Return a one-line message for an error of transformers or safetensors."""
    reason = str(problem)
    if _UNKNOWN_CLASS in reason:
        found = re.search(r"(\w+)Config'?>", reason)
        kind = f"a {found[1]} model" if found else "something else"
        return f"model {source.shown!r} is {kind}, not a causal language model: give a decoder-only checkpoint"
    if "ignore_mismatched_sizes" in reason:
        return f"model {source.shown!r}: the sizes in its config.json are not those of its weights"
    if "access a gated repo" in reason:
        return gated(source.shown)
    if "trust_remote_code" in reason:
        return f"model {source.shown!r} needs its own Python code: review it, then add --trust-remote-code"
    first = one_line(reason.split("\n", 1)[0] or type(problem).__name__, 240).rstrip(".:")
    remedy = "check that its files are complete, and the values in config.json and generation_config.json"
    return f"model {source.shown!r}: {what} ({first}); {remedy}"
