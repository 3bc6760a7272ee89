"""Examinations for `lade doctor`: the machine, how a model's weights are laid out on it, and the time of passes."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from statistics import median
from time import time
from typing import Any

import torch

from lade.announcements import contention_now
from lade.backends.cpu.kernels import kernel
from lade.backends.cpu.packing.integers import Int8Linear
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.panel_products import panel_for
from lade.backends.cpu.packing.weight import DOT_PANEL, TILE_PANEL
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.decoding.drafting.step_cost import KNOTS, StepCost
from lade.model.facts import ModelFacts
from lade.model.runner import runner_for
from lade.model.supports import supports, unwrap
from lade.native import COMPILER_REMEDY, WITHOUT, library, library_path, processor_name
from lade.tuning import cost_cache

FREE = 1.2
"""A pass of several tokens counts as free up to this multiple of the time of one token."""
LACKS_KERNELS = f"so {WITHOUT}: {COMPILER_REMEDY}"
"""What follows where the compiled kernels are missing or old, and the remedy."""
_ROUNDS = 10_000  # the time limit comes first
_INSTRUCTIONS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "plain")
_PRODUCTS = {0: "oneDNN", DOT_PANEL: "AVX512-BF16", TILE_PANEL: "AMX"}


def machine() -> dict[str, Any]:
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


def layout(model: Any, undone: Mapping[str, str], *, invariant: bool) -> dict[str, Any]:
    """Return how a model's weights are laid out and its passes are run, and the reasons for what is not done.

    `undone` has those of the shell, for "packed" and "invariant", of which the latter is given, too.
    """
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
        "invariant": invariant,
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
