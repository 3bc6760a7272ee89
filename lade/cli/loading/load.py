"""Loading a model and its tokenizer, from a folder, the hub, or the embedded one. All that can go wrong is one line."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig
from transformers.utils import logging as _logging

from lade.cli.loading import checkpoint
from lade.cli.loading.hub import Source, find, find_adapter, gated
from lade.cli.loading.loaded_model import LoadedModel
from lade.cli.loading.processor import load_processor
from lade.cli.loading.quantization import quantization_config
from lade.cli.options.model import Loading
from lade.cli.terminal import Terminal, one_line
from lade.config import Lookahead, LookaheadConfig
from lade.errors import ConfigError, InputError
from lade.memory import Memory
from lade.model.invariant import make_invariant
from lade.model.packing import folder as packed_folder
from lade.model.packing import pack as packing
from lade.tuning.packing_choice import pack_if_it_pays

_UNKNOWN_CLASS = "Unrecognized configuration class"
_SILENT = 50  # logging.CRITICAL
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAM_FIELDS = ("early_stopping", "length_penalty")
_DECIDED_BY_THE_SHELL = frozenset(
    [
        *SAMPLING_FIELDS,
        *BEAM_FIELDS,
        "do_sample",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "diversity_penalty",
        "penalty_alpha",
        "dola_layers",
        "max_length",
        "max_new_tokens",
        "max_time",
        "stop_strings",
        "prompt_lookup_num_tokens",
        "use_mtp",
        "use_cache",
        "cache_implementation",
        "cache_config",
        "return_dict_in_generate",
        "output_scores",
        "output_logits",
        "output_attentions",
        "output_hidden_states",
    ]
)
"""Fields of a checkpoint's generation_config that would make it anything else than greedy decoding of one text."""


def load(
    loading: Loading,
    *,
    term: Terminal,
    pack: bool | None = False,
    images: bool | None = False,
    invariant: bool = False,
    processes: int = 1,
) -> LoadedModel:
    """Load a model for the shell; the embedded one runs on one CPU thread.

    Args:
        loading: which model, and how.
        term: says whether transformers may talk.
        pack: prepack the linear layers for the CPU; None: if that can be done, the embedded model excepted.
        images: whether the model is to take images; None: if it can.
        invariant: make it round alike in every pass.
        processes: over how many of them to split its layers; all of them load it.

    Raises:
        ConfigError, InputError, UnsupportedModelError: the one line that the user is to read.
    """
    loading.check()
    if processes > 1:
        loading.check_split(pack=pack, invariant=invariant)
    if not term.debug:
        term.closing.enter_context(_quiet())
    device = "cpu" if loading.weights is not None and loading.device == "auto" else loading.device
    target = None if loading.device_map is not None or processes > 1 else _device(device)
    term.working(f"looking for {loading.name}")
    source = find(loading)
    with _downloading(term) if source.download and term.animated else nullcontext():
        term.working(f"loading {source.shown}")
        tokenizer = _load_tokenizer(source, loading)
        is_packed = source.local and packed_folder.is_packed_folder(source.name)
        model = _load_packed(source, loading) if is_packed else _load_model(source, loading, target, images, processes)
        processor = functools.cache(functools.partial(load_processor, source, loading))
        checkpoint.check(model, source.shown, source.name)
        if loading.adapter is not None:
            _adapt(model, loading, source)
    _set_up(model, loading, term, pack=pack, is_packed=is_packed, invariant=invariant)
    fields = ("do_sample", *SAMPLING_FIELDS, *BEAM_FIELDS)
    checkpoint_defaults = {name: getattr(model.generation_config, name, None) for name in fields}
    model.generation_config = _greedy(model.generation_config)
    kept = {name: value for name, value in checkpoint_defaults.items() if value is not None}
    variant = {**loading.variant, **({"weights": packing.INT8} if is_packed else {})}
    return LoadedModel(source.shown, model, tokenizer, kept, variant, processor)


def remembering(loaded: LoadedModel, lookahead: Lookahead, memory: Path | None) -> Lookahead:
    """`lookahead` with a memory from a file, if one was given.

    Raises:
        InputError: it cannot be read, is damaged, or is of another tokenizer.
    """
    if memory is None:
        return lookahead
    assert isinstance(lookahead, LookaheadConfig), "Speed.lookahead sees to it"
    return replace(lookahead, memory=Memory.load(memory, loaded.tokenizer))


def _pack(model: Any, term: Terminal, *, wanted: bool) -> None:
    """wanted: whether --pack was given; otherwise it is done where it pays, and --debug tells where it was not."""
    term.working("packing the weights")
    if wanted:
        packing.pack(model)
    elif (reason := pack_if_it_pays(model)) and term.debug:
        term.say(f"not packed: {reason}", "dim")


def _set_up(
    model: Any, loading: Loading, term: Terminal, *, pack: bool | None, is_packed: bool, invariant: bool
) -> None:
    """What is done to a model in place: packing, threads, rounding."""
    if loading.weights is not None and not is_packed:
        term.working("packing the weights")
        packing.pack(model, weights=loading.weights)
    elif pack or (pack is None and loading.model is not None and model.device.type == "cpu"):
        _pack(model, term, wanted=bool(pack))
    if loading.model is None:
        torch.set_num_threads(1)  # so small a model gains nothing from two, which on a busy machine wait for each other
    if invariant:  # for the number of threads that it is to have
        term.working("trying whether it rounds alike in every pass")
        make_invariant.invariant(model)


def _load_tokenizer(source: Source, loading: Loading) -> Any:
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


def _load_model(
    source: Source, loading: Loading, target: torch.device | None, images: bool | None, processes: int = 1
) -> Any:
    """The model on its device, or spread over several; `target` is None where a map or a split says where."""
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


def _load_packed(source: Source, loading: Loading) -> Any:
    """A model that `lade pack` has saved, which is what it is."""
    given = {"dtype": loading.dtype != "auto", "quantization": loading.quantization, "device-map": loading.device_map}
    for name, value in given.items():
        if value:
            raise ConfigError(name, getattr(loading, name.replace("-", "_")), "the model is saved packed: leave it out")
    if loading.device not in ("auto", "cpu"):
        raise ConfigError("device", loading.device, "the model is packed for the CPU: leave it out")
    return packed_folder.load_packed(source.name, attn_implementation=loading.attn_implementation)


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


def _adapt(model: Any, loading: Loading, source: Source) -> None:
    """Put a PEFT adapter into a model; its weights stay apart, so that it computes what PEFT does."""
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


def _dtype(loading: Loading) -> torch.dtype | str:
    if loading.dtype == "auto":
        # The embedded weights are stored in bfloat16 to be small; where near ties do not round apart, texts are equal.
        return torch.float32 if loading.model is None else "auto"
    dtype: torch.dtype = getattr(torch, loading.torch_dtype)
    return dtype


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device).cpu()
    except Exception as problem:
        reason = one_line(str(problem).split("\n", 1)[0], 120)
        raise ConfigError("device", name, f"it is not there ({reason}); give cpu, or leave it out") from problem
    return device


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


def _greedy(config: GenerationConfig) -> GenerationConfig:
    """A checkpoint's generation_config, its stop tokens and penalties kept, made greedy without a word of warning."""
    kept = {key: value for key, value in config.to_dict().items() if key not in _DECIDED_BY_THE_SHELL}
    return GenerationConfig.from_dict({**kept, "do_sample": False, "num_beams": 1})


@contextmanager
def _downloading(term: Terminal) -> Iterator[None]:
    """The hub's bars show how far a download is, and transformers' how far loading; no line of ours among them."""
    logging: Any = _logging  # untyped
    term.pausing(True)
    logging.enable_progress_bar()
    try:
        yield
    finally:
        logging.disable_progress_bar()
        term.pausing(False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Transformers' progress bars and advice are switched off, and afterwards are as they were."""
    logging: Any = _logging  # untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(_SILENT)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
