"""A model on this machine: packed and batch-invariant where that pays, the time of its passes, its processes.

The shell sets models up by it, `lade pack` measures what rounding costs, and `lade doctor` examines all of it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import time
from typing import Any, Literal

import torch
from torch import distributed as dist

from lade.announcements import contention_now
from lade.backends.cpu.invariant import make_invariant
from lade.backends.cpu.invariant_marker import invariance_of
from lade.backends.cpu.kernels import kernel
from lade.backends.cpu.packing import integers
from lade.backends.cpu.packing import pack as packing
from lade.backends.cpu.packing.folder import check_target, is_packed_folder
from lade.backends.cpu.packing.gguf_file import gguf_file
from lade.backends.cpu.packing.integers import Int8Linear
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.panel_products import panel_for
from lade.backends.cpu.packing.weight import DOT_PANEL, TILE_PANEL
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.backends.processes.leader import connect
from lade.backends.processes.team import dismiss, team_of
from lade.decoding.drafting.step_cost import KNOTS, StepCost
from lade.errors import ConfigError, InputError, UnsupportedModelError
from lade.hf.distributed import follow_until_dismissed
from lade.model.config import LEARNED_POSITIONS, dtype_name
from lade.model.facts import ModelFacts
from lade.model.runner import runner_for
from lade.model.supports import supports, unwrap
from lade.native import COMPILER_REMEDY, WITHOUT, library, library_path, processor_name
from lade.tuning import cost_cache
from lade.tuning.packing_choice import pack_if_it_pays

logger = logging.getLogger(__name__)

FREE = 1.2
"""A pass of several tokens counts as free up to this multiple of the time of one token."""
LACKS_KERNELS = f"so {WITHOUT}: {COMPILER_REMEDY}"
"""What follows where the compiled kernels are missing or old, and the remedy."""
_ROUNDS = 10_000  # the time limit comes first
_INSTRUCTIONS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "plain")
_PRODUCTS = {0: "oneDNN", DOT_PANEL: "AVX512-BF16", TILE_PANEL: "AMX"}


def stored_as(path: Path) -> Literal["gguf", "packed"] | None:
    """Return how a model is stored in a file or folder, if not as transformers does."""
    if gguf_file(path) is not None:
        return "gguf"
    return "packed" if is_packed_folder(path) else None


def context_of(model: Any) -> tuple[int | None, bool]:
    """Return the context length in tokens, None if the config does not say; and whether positions end there."""
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "max_position_embeddings", None)
    return (length if isinstance(length, int) and length > 0 else None), config.model_type in LEARNED_POSITIONS


def setup_of(model: Any) -> dict[str, Any]:
    """Return whether linear layers are packed, their integer format or None, and whether it is batch invariant."""
    invariant = invariance_of(unwrap(model)) is not None
    weights = packing.integer_weights(model)
    return {"packed": packing.packed_layers(model) > 0, "weights": weights, "invariant": invariant}


def uninvariant_reason(model: Any) -> str:
    """Return why a model is not made batch invariant unasked; empty if it is."""
    if model.device.type != "cpu":
        return "on a GPU it is not done unasked"
    if not packing.rounds_visibly(model):
        return f"rounding hardly ever shows in {dtype_name(model.dtype)}"
    return make_invariant.refusal(model)


def set_up(
    model: Any, *, pack: bool | None, weights: str | None, invariant: bool | None, say: Callable[[str], None]
) -> dict[str, str]:
    """Pack a model in place and make it batch invariant; None for what keeps its text and pays.

    Packing changes the last bits of a model in 16 bits. So by default such a model is packed only together with
    invariant kernels, which make the text of plain decoding that of drafting. `weights` rounds to integers, and `say`
    is told why invariance is refused.

    Returns:
        Reasons why the model is not "packed" or "invariant", where it is not.
    """
    undone = {"packed": "not asked for"}
    if weights is not None:
        logger.info("packing the weights")
        packing.pack(model, weights=weights)
        pack = False
    rounds, on_cpu = packing.rounds_visibly(model), model.device.type == "cpu"
    wanted = not uninvariant_reason(model) if invariant is None else invariant
    packs_in_panels = pack is None and wanted and model.dtype.itemsize == 2 and panel_for(model.dtype) > 0
    if pack or packs_in_panels:
        undone["packed"] = "its layers are small"  # unless one of them is packed
        if pack or packing.packable(model):
            logger.info("packing the weights")
            packing.pack(model, panels=packs_in_panels)
    elif pack is None and on_cpu and not rounds:
        logger.info("packing the weights")
        undone["packed"] = pack_if_it_pays(model) or ""
    elif pack is None:
        undone["packed"] = "it would change the last bits: --pack" if on_cpu else "packing is for the CPU"
    if not wanted:
        undone["invariant"] = "not asked for" if invariant is False else uninvariant_reason(model)
    else:
        logger.info("checking batch invariance")
        try:
            make_invariant.invariant(model)
        except UnsupportedModelError as problem:
            if invariant:
                raise
            if packs_in_panels:
                packing.unpack(model)
                undone["packed"] = "without invariant kernels it would change the last bits: --pack"
            undone["invariant"] = problem.reason
            say(f"decoded with its own kernels: {problem.reason}")
    if packing.packed_layers(model):
        del undone["packed"]
    return undone


def rounded(
    model: Any, weights: str, *, keep: Sequence[str], ids: Sequence[int], window: int, target: Path | None
) -> dict[str, Any]:
    """Round a model's weights to "int8" or "int4" in place, and return what that saves and what it costs.

    Layers that `keep` names, or matches, keep their dtype. A text is read before and after, in windows of so many
    tokens, unless it has no ids. The folder that the result will be saved to is checked first.

    Raises:
        InputError: no layer is large enough, or nothing can be saved to the folder.
        ConfigError: `keep` leaves no layer to round.
    """
    kinds = packing.packable(model, weights=weights, keep=keep)
    small = f"linear layers below {packing.MIN_WEIGHTS:,} weights keep their dtype"
    if not kinds:
        raise InputError(f"nothing to round to {weights}: {small}; give a larger model")
    if not any(issubclass(kind, Int8Linear) for kind in kinds.values()):
        raise ConfigError("keep", ",".join(keep), f"no layer is left to round: {small}")
    if target is not None:
        check_target(target)
    facts, before = dict[str, Any](), _bytes(model)
    errors: list[integers.LayerError] = []
    if ids:
        logger.info("reading the text with the model as it is")
        perplexity = integers.perplexity(model, ids, window)
        facts |= {"tokens": len(ids), "window": window, "perplexity_before": perplexity}
    logger.info("packing the weights")
    packing.pack(model, keep_original=bool(ids), weights=weights, keep=keep)
    if ids:
        logger.info("reading the text in %s", weights)
        with integers.watched(model) as errors:
            facts["perplexity_after"] = integers.perplexity(model, ids, window)
    facts |= {"int8_layers": packing.int8_layers(model), "int4_layers": packing.int4_layers(model)}
    facts |= {"kept_layers": packing.kept_layers(model), "bytes_before": before, "bytes_after": _bytes(model)}
    return {**facts, "errors": [asdict(error) for error in errors]}


def _bytes(model: Any) -> int:
    """Return the bytes of all weights, for int8 and int4 layers those of the integers even if the original is kept."""
    in_integers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    own = {id(module.weight) for module in in_integers} - packing.shared_weights(model)
    dense: int = sum(parameter.nbytes for parameter in model.parameters() if id(parameter) not in own)
    return dense + sum(module.nbytes for module in in_integers)


def hardware() -> dict[str, Any]:
    """Return facts about hardware and compiled kernels."""
    kernels = "compiled"
    if library() is None:
        kernels = "older than their sources" if library_path().exists() else "missing"
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernels": kernels,
        "bfloat16_products": _PRODUCTS[panel_for(torch.bfloat16)],
        "integer_products": _best("multiply_int8") or "torch",
        "attention_and_norms": _best("attend") or "torch",
        "compiler": next(filter(shutil.which, ("c++", "g++", "clang++", "cl")), None),
    }


def _best(name: str) -> str | None:
    """Return the instructions by which a kernel runs here."""
    return next((each for each in _INSTRUCTIONS if kernel(name, each).available), None)


def layout(model: Any, undone: Mapping[str, str]) -> dict[str, Any]:
    """Return how a model's weights are laid out and its passes are run; `undone` is what `set_up` has returned."""
    inner, threads = unwrap(model), torch.get_num_threads()
    products = Counter(_product(each) for each in inner.modules() if isinstance(each, PackedLinear))
    refusal = capture_refusal(inner) if inner.device.type == "cuda" else "only passes on a CUDA device are"
    unfused = supports(inner).fused
    return {
        "threads": threads,
        "contention": contention_now(threads) or None,
        "packed_layers": products.total(),
        "products": ", ".join(f"{number} in {name}" for name, number in products.items()) or None,
        "not_packed": undone.get("packed"),
        "invariant": setup_of(inner)["invariant"],
        "not_invariant": undone.get("invariant"),
        "captured": not refusal,
        "not_captured": refusal or None,
        "fused": not unfused,
        "not_fused": unfused or None,
    }


def _product(layer: PackedLinear) -> str:
    if isinstance(layer, Int8Linear):
        return f"{layer.format} by {_best('multiply_int8') or 'torch'}"
    return f"{str(layer.dtype).removeprefix('torch.')} by {_PRODUCTS[layer.panel]}"


def measured_passes(model: Any, cached: int, seconds: float) -> dict[str, Any]:
    """Measure a model's passes within a time limit, and save their cost for later generations.

    There are `cached` tokens in the cache, or as many as the model has positions for. The first two sizes take what
    they take.

    Returns:
        Tokens in the cache, the largest number of tokens up to which all passes are free, path of the file that later
        generations read, or None if it cannot be written, and the median in seconds of each size in tokens.
    """
    inner = unwrap(model)
    runner = runner_for(ModelFacts.of(inner), supports(inner).require(), inner.generation_config)
    vocabulary = inner.get_input_embeddings().weight.shape[0]
    taken: dict[int, list[float]] = {}
    with closing(cost_cache.StepTimer(runner, vocabulary=vocabulary, largest=KNOTS[-1], cached=cached)) as timer:
        order = [*cost_cache.SIZES, *(knot for knot in KNOTS if knot not in cost_cache.SIZES)]
        sizes = [size for size in order if size <= timer.largest]
        for size, each in cost_cache.samples_of(timer, sizes, budget_s=seconds, rounds=_ROUNDS):
            taken.setdefault(size, []).append(each)
    samples = {size: taken[size][1:] or taken[size] for size in sorted(taken)}  # the first of several warms up
    medians = {size: median(each) for size, each in samples.items()}
    costly = [size for size, middle in medians.items() if middle > FREE * medians[1]]
    key, cost = cost_cache.key_of(inner, runner), StepCost.of(samples, measured_at=time())
    return {
        "cached": timer.cached,
        "free_tokens": max(size for size in medians if not costly or size < costly[0]),
        "saved": str(cost_cache.RECORDS.path_of(key)) if cost_cache.use(inner, key, cost) else None,
        "sizes": [{"size": n, "passes": len(samples[n]), "median_s": middle} for n, middle in medians.items()],
    }


def join_processes() -> int:
    """Join the processes of torchrun and return their number; 1 without torchrun."""
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return 1
    connect()
    return dist.get_world_size()


def is_first_process() -> bool:
    """Return True in the process of rank 0."""
    return dist.get_rank() == 0


@contextmanager
def leading(model: Any, processes: int) -> Iterator[bool]:
    """Yield True in the first process; the others follow its passes until its block ends, and then get False.

    The followers ignore SIGTERM and Ctrl-C, which torchrun sends to all: the first process may have work to finish.
    """
    if processes == 1:
        yield True
        return
    team_of(model)  # these are collective calls, due in every process before its first generation
    supports(model)
    if is_first_process():
        try:
            yield True
        finally:
            dismiss(model)
        return
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    follow_until_dismissed(model)
    yield False
