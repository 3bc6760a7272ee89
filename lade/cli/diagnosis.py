"""Examinations of `lade doctor`: machine, versions, a model's layout, times of its passes, a trial of drafting."""

from __future__ import annotations

import os
import platform
import shutil
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from time import time
from typing import Any

import torch
import transformers
from rich.table import Table
from rich.text import Text

from lade.announcements import contention_now
from lade.backends.cpu.kernels import kernel
from lade.backends.cpu.packing.integers import Int8Linear
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.panel_products import panel_for
from lade.backends.cpu.packing.weight import DOT_PANEL, TILE_PANEL
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.cli.demo import questions_for
from lade.cli.encoder import Encoder
from lade.cli.loading import LoadedModel
from lade.cli.options.model import Template
from lade.cli.prompts import Prompt
from lade.cli.run import Generation, decode
from lade.cli.terminal import Terminal, count
from lade.decoding.drafting.step_cost import KNOTS, StepCost
from lade.model.facts import ModelFacts
from lade.model.runner import runner_for
from lade.model.supports import supports, unwrap
from lade.native import COMPILER_REMEDY, WITHOUT, library, library_path, processor_name
from lade.tuning import cost_cache
from lade.version import TESTED_TRANSFORMERS, __version__, minor_version

FREE = 1.2
"""A pass of several tokens counts as free up to this multiple of the time of one token."""
TRIAL_S = 30.0
LONGEST_ANSWER, SHORTEST_ANSWER, _WARMUP_TOKENS = 96, 24, 8
_BAR_WIDTH = 32
_ROUNDS = 10_000  # the time limit comes first
_INSTRUCTIONS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "plain")
_PRODUCTS = {0: "oneDNN", DOT_PANEL: "AVX512-BF16", TILE_PANEL: "AMX"}
_DEAR, _SHORT_S, _SMALL, _LARGE = 3.0, 0.003, 1.05, 10**8


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


def versions() -> dict[str, Any]:
    """Return versions, and the newest of transformers that was tested."""
    return {
        "lade": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tested_transformers": ".".join(map(str, TESTED_TRANSFORMERS)),
    }


def layout(loaded: LoadedModel) -> dict[str, Any]:
    """Return how a model's weights are laid out and its passes are run, and the reasons for what is not done."""
    model, threads = unwrap(loaded.model), torch.get_num_threads()
    products = Counter(_product(each) for each in model.modules() if isinstance(each, PackedLinear))
    refusal = capture_refusal(model) if model.device.type == "cuda" else "only passes on a CUDA device are"
    unfused = supports(model).fused
    return {
        "threads": threads,
        "contention": contention_now(threads) or None,
        "packed_layers": products.total(),
        "products": ", ".join(f"{number} in {name}" for name, number in products.items()) or None,
        "not_packed": loaded.undone.get("packed"),
        "invariant": loaded.invariant,
        "not_invariant": loaded.undone.get("invariant"),
        "captured": not refusal,
        "not_captured": refusal or None,
        "fused": not unfused,
        "not_fused": unfused or None,
    }


def _product(layer: PackedLinear) -> str:
    if isinstance(layer, Int8Linear):
        return f"{layer.format} by {_best('multiply_int8') or 'torch'}"
    return f"{str(layer.dtype).removeprefix('torch.')} by {_PRODUCTS[layer.panel]}"


@dataclass
class Curve:
    """Times of passes by the number of tokens they feed."""

    cached: int  # tokens in the cache during each pass
    samples: dict[int, list[float]]  # seconds by number of fed tokens, without the first of several, which warms up
    saved: str | None = None  # path of the file that later generations read; None if it cannot be written

    @property
    def free(self) -> int:
        """Largest number of tokens up to which all passes are free."""
        limit = FREE * self.median(1)
        costly = [size for size in self.samples if self.median(size) > limit]
        return max(size for size in self.samples if size < min(costly, default=KNOTS[-1] + 1))

    def median(self, size: int) -> float:
        """Return the median time in seconds."""
        return median(self.samples[size])

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that `--json` prints."""
        points = [
            {"size": size, "passes": len(taken), "median_s": self.median(size)} for size, taken in self.samples.items()
        ]
        return {"cached": self.cached, "free_tokens": self.free, "saved": self.saved, "sizes": points}

    @property
    def title(self) -> str:
        """The heading of its table."""
        price = f"{count(self.free, 'token')} for the price of one (up to {FREE:g} times)"
        return f"passes over {count(self.cached, 'cached token')}: {price}"

    def table(self) -> Table:
        """Return the times as a table with bars, those of free passes in green."""
        table = Table(box=None, pad_edge=False)
        for name in ("tokens", "ms", "relative"):
            table.add_column(name, justify="right")
        table.add_column("")
        longest = max(map(self.median, self.samples))
        for size in self.samples:
            middle = self.median(size)
            bar = "█" * max(1, round(_BAR_WIDTH * middle / longest))
            style = "green" if size <= self.free else "cyan"
            table.add_row(str(size), f"{1e3 * middle:.2f}", f"{middle / self.median(1):.2f}", Text(bar, style))
        return table


def measured_curve(loaded: LoadedModel, cached: int, seconds: float) -> Curve:
    """Measure a model's passes within a time limit, and save their cost for later generations.

    There are `cached` tokens in the cache, or as many as the model has positions for. The first two sizes take what
    they take.
    """
    model = unwrap(loaded.model)
    runner = runner_for(ModelFacts.of(model), supports(model).require(), model.generation_config)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    taken: dict[int, list[float]] = {}
    with closing(cost_cache.StepTimer(runner, vocabulary=vocabulary, largest=KNOTS[-1], cached=cached)) as timer:
        order = [*cost_cache.SIZES, *(knot for knot in KNOTS if knot not in cost_cache.SIZES)]
        sizes = [size for size in order if size <= timer.largest]
        for size, each in cost_cache.samples_of(timer, sizes, budget_s=seconds, rounds=_ROUNDS):
            taken.setdefault(size, []).append(each)
    curve = Curve(timer.cached, {size: taken[size][1:] or taken[size] for size in sorted(taken)})
    key, cost = cost_cache.key_of(model, runner), StepCost.of(curve.samples, measured_at=time())
    if cost_cache.use(model, key, cost):
        curve.saved = str(cost_cache.RECORDS.path_of(key))
    return curve


def trial(loaded: LoadedModel, curve: Curve, term: Terminal) -> dict[str, Any]:
    """Answer three prompts plainly and with drafts, in turn, as short as the curve tells; compare texts and times."""
    encoder, totals = Encoder(loaded, Template()), {None: Generation(), "auto": Generation()}
    prompts = [encoder(Prompt(text)) for text in questions_for(encoder)]
    longest = int(TRIAL_S / (len(prompts) * len(totals) * curve.median(1)))
    tokens, same = min(LONGEST_ANSWER, max(SHORTEST_ANSWER, longest)), True
    for method in totals:  # first calls compile
        _answer(loaded, prompts[0], method, _WARMUP_TOKENS, term)
    for prompt in prompts:
        runs = {method: _answer(loaded, prompt, method, tokens, term) for method in totals}
        same &= runs[None].token_ids == runs["auto"].token_ids
        for method, run in runs.items():
            totals[method].absorb(run)
    plain, drafted = totals[None].tokens_per_s, totals["auto"].tokens_per_s
    return {
        "tokens": totals["auto"].stats.new_tokens,
        "tokens_per_step": totals["auto"].stats.tokens_per_step,
        "plain_tokens_per_s": plain,
        "tokens_per_s": drafted,
        "speedup": drafted / plain if plain and drafted else None,
        "same_tokens": same,
        "explanation": totals["auto"].stats.explain(),
    }


def _answer(loaded: LoadedModel, prompt: list[int], method: Any, tokens: int, term: Terminal) -> Generation:
    run = decode(loaded, prompt, lookahead=method, max_new_tokens=tokens, term=term, on_step=lambda step: None)
    if run.interrupted:
        raise KeyboardInterrupt
    return run


def advice(found: Mapping[str, Any]) -> list[str]:
    """Return what to change, most important first, given what `lade doctor --json` prints; empty if all is well."""
    here, used, model = found["machine"], found["versions"], found["model"]
    lacks_kernels = here["kernels"] != "compiled"
    return [
        *([f"The compiled kernels are {here['kernels']}, so {WITHOUT}: {COMPILER_REMEDY}."] if lacks_kernels else []),
        *([model["contention"]] if model["contention"] else []),
        *(
            [f"transformers {used['transformers']} is newer than was tested: install {used['tested_transformers']}."]
            if minor_version(used["transformers"]) > TESTED_TRANSFORMERS
            else []
        ),
        *_advice_on_model(here, model),
        *(_advice_on_speed(found) if "trial" in found else []),
    ]


def _advice_on_model(here: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    on_cpu, large = model["device"] == "cpu", model["parameters"] >= _LARGE
    lines = []
    if not model["supported"]:
        lines.append(f"The model is decoded plainly: {model['reason']}. docs/models.md lists what is supported.")
    if on_cpu and here["gpu"]:
        lines.append(f"The model is on the CPU, and there is a GPU ({here['gpu']}): --device cuda.")
    if not on_cpu and not model["captured"]:
        lines.append(f"Passes are launched one kernel at a time: {model['not_captured']}.")
    elif not on_cpu and not model["fused"]:
        lines.append(f"Passes are not fused into few kernels, which takes a third longer: {model['not_fused']}.")
    if on_cpu and large and model["threads"] < here["cores"] and not model["contention"]:
        cores = here["cores"]
        lines.append(f"torch uses {model['threads']} of {cores} cores: OMP_NUM_THREADS={cores} if they idle.")
    if on_cpu and large and model["dtype"] == "float32" and here["bfloat16_products"] != "oneDNN":
        lines.append("In bfloat16 (--dtype bfloat16) passes read half as many bytes; the text may differ.")
    return lines


def _advice_on_speed(found: Mapping[str, Any]) -> list[str]:
    tried, model, times = found["trial"], found["model"], found["curve"]["sizes"]
    one, eight = (next((each["median_s"] for each in times if each["size"] == size), 0.0) for size in (1, 8))
    lines = []
    if not tried["same_tokens"]:
        lines.append("Texts with and without drafts differ, as scores tie in 16 bits: --invariant, or --dtype float32.")
    if eight > _DEAR * one:
        packing = "" if model["packed_layers"] else ": on a CPU try --pack or --weights int8"
        lines.append(f"A pass over 8 tokens takes {eight / one:.1f} times as long as over one{packing}.")
    if one < _SHORT_S:
        lines.append(f"A pass takes {1e3 * one:.1f} ms, of which drafting takes a good part: larger models gain more.")
    if (tried["speedup"] or 0.0) < _SMALL:
        lines.append("Drafts did not pay here. A memory helps if texts resemble each other: lade warm.")
    return lines
