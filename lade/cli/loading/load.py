"""Loading a model and its tokenizer, from a folder, the hub, or the embedded one. All that can go wrong is one line."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lade.backends.cpu.invariant import make_invariant
from lade.backends.cpu.packing import folder as packed_folder
from lade.backends.cpu.packing import pack as packing
from lade.cli.loading import checkpoint
from lade.cli.loading.adapter import put_adapter
from lade.cli.loading.from_pretrained import load_model, load_tokenizer
from lade.cli.loading.generation_defaults import greedy, sampling_defaults
from lade.cli.loading.hub import Source, find
from lade.cli.loading.loaded_model import LoadedModel
from lade.cli.loading.processor import load_processor
from lade.cli.loading.progress import downloading, quiet
from lade.cli.options.model import Loading
from lade.cli.terminal import Terminal, one_line
from lade.config import Lookahead, LookaheadConfig
from lade.errors import ConfigError
from lade.memory import Memory
from lade.tuning.packing_choice import pack_if_it_pays


def load(
    loading: Loading,
    *,
    term: Terminal,
    pack: bool | None = False,
    images: bool | None = False,
    invariant: bool = False,
    threads: int | None = None,
    processes: int = 1,
) -> LoadedModel:
    """Load a model for the shell; the embedded one runs on one CPU thread.

    Args:
        loading: which model, and how.
        term: says whether transformers may talk.
        pack: prepack the linear layers for the CPU; None: if that can be done, the embedded model excepted.
        images: whether the model is to take images; None: if it can.
        invariant: make it round alike in every pass.
        threads: of the CPU; None: as many as there are, and one for the embedded model.
        processes: over how many of them to split its layers; all of them load it.

    Raises:
        ConfigError, InputError, UnsupportedModelError: the one line that the user is to read.
    """
    loading.check()
    if processes > 1:
        loading.check_split(pack=pack, invariant=invariant)
    if not term.debug:
        term.closing.enter_context(quiet())
    device = "cpu" if loading.weights is not None and loading.device == "auto" else loading.device
    target = None if loading.device_map is not None or processes > 1 else _device(device)
    term.working(f"looking for {loading.name}")
    source = find(loading)
    with downloading(term) if source.download and term.animated else nullcontext():
        term.working(f"loading {source.shown}")
        tokenizer = load_tokenizer(source, loading)
        is_packed = source.local and packed_folder.is_packed_folder(source.name)
        model = _load_packed(source, loading) if is_packed else load_model(source, loading, target, images, processes)
        processor = functools.cache(functools.partial(load_processor, source, loading))
        checkpoint.check(model, source.shown, source.name)
        if loading.adapter is not None:
            put_adapter(model, loading, source)
    if threads is not None or loading.model is None:  # so small a model gains nothing from two
        torch.set_num_threads(threads or 1)
    _set_up(model, loading, term, pack=pack, is_packed=is_packed, invariant=invariant)
    defaults = sampling_defaults(model.generation_config)
    model.generation_config = greedy(model.generation_config)
    variant = {**loading.variant, **({"weights": packing.INT8} if is_packed else {})}
    return LoadedModel(source.shown, model, tokenizer, defaults, variant, processor)


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
    """What is done to a model in place: packing, rounding, for the threads that it is to have."""
    if loading.weights is not None and not is_packed:
        term.working("packing the weights")
        packing.pack(model, weights=loading.weights)
    elif pack or (pack is None and loading.model is not None and model.device.type == "cpu"):
        _pack(model, term, wanted=bool(pack))
    if invariant:
        term.working("trying whether it rounds alike in every pass")
        make_invariant.invariant(model)


def _load_packed(source: Source, loading: Loading) -> Any:
    """A model that `lade pack` has saved, which is what it is."""
    given = {"dtype": loading.dtype != "auto", "quantization": loading.quantization, "device-map": loading.device_map}
    for name, value in given.items():
        if value:
            raise ConfigError(name, getattr(loading, name.replace("-", "_")), "the model is saved packed: leave it out")
    if loading.device not in ("auto", "cpu"):
        raise ConfigError("device", loading.device, "the model is packed for the CPU: leave it out")
    return packed_folder.load_packed(source.name, attn_implementation=loading.attn_implementation)


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
