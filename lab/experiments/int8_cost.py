"""Whole steps of a packed model and of the same one in int8, arm by arm in turn.

    python lab/experiments/int8_cost.py --model FOLDER --inflate 500e6 [--rounds 20]

An arm is a dtype and how its weights are packed. "alone" feeds a lone token to large float32 layers as the one row that
it is, and not as four.
"""

from __future__ import annotations

from statistics import quantiles
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, DynamicCache

import lade
from lade.backends.cpu.packing import linear
from lade.model.facts import CACHE
from lade_lab.inflation import inflate

SIZES = (1, 8, 16)
ARMS = ("float32 packed", "float32 packed, alone", "float32 int8", "bfloat16 packed", "bfloat16 int8")
NEVER = 2**62


def built(model: str, params: float | None, arm: str) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loaded = (inflate(loaded, params) if params else loaded).to(getattr(torch, arm.partition(" ")[0]))
    return lade.pack(loaded, weights="int8" if arm.endswith("int8") else None)


@torch.no_grad()
def seconds(model: Any, cache: DynamicCache, size: int) -> float:
    ids = torch.randint(model.config.vocab_size, (1, size))
    start = perf_counter()
    model(ids, **{CACHE: cache})
    taken = perf_counter() - start
    cache.crop(-size)
    return taken


@torch.no_grad()
def main(
    model: Annotated[str, typer.Option(help="folder or hub id")],
    params: Annotated[float | None, typer.Option("--inflate", help="parameters to grow it to")] = None,
    cached: Annotated[int, typer.Option(help="tokens in the cache")] = 256,
    rounds: int = 20,
    threads: int = 1,
) -> None:
    torch.set_num_threads(threads)
    usual = linear.LONE_FROM
    models = {arm: built(model, params, arm) for arm in ARMS if not arm.endswith("alone")}
    models["float32 packed, alone"] = models["float32 packed"]
    caches = {arm: DynamicCache(config=each.config) for arm, each in models.items()}
    for arm, each in models.items():
        each(torch.randint(each.config.vocab_size, (1, cached)), **{CACHE: caches[arm]})
    taken: dict[tuple[str, int], list[float]] = {(arm, size): [] for arm in ARMS for size in SIZES}
    for _ in range(rounds + 1):
        for (arm, size), samples in taken.items():
            linear.LONE_FROM = NEVER if arm.endswith("alone") else usual
            samples.append(1e3 * seconds(models[arm], caches[arm], size))
    for arm in ARMS:
        shown = []
        for size in SIZES:
            low, middle, high = quantiles(taken[arm, size][1:], n=4)
            shown.append(f"{middle:6.1f} ({low:.1f} to {high:.1f})")
        print(f"{arm:22} {' '.join(shown)}")


if __name__ == "__main__":
    typer.run(main)
