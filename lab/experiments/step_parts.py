"""Time of a CPU pass by part, for several numbers of tokens.

    python lab/experiments/step_parts.py --model FOLDER --inflate 500e6 [--weights int8 | --weights dense] [--invariant]

Each module without children is timed by its class, and so are attention and the cache; the rest is what modelling code
does between them (rotary positions, residuals, reshapes) and Python. What timing costs, some 0.3 us a part, is in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lade
from lade.backends.cpu.packing.linear import PackedLinear
from lade.model.facts import CACHE
from lade_lab.inflation import inflate

SIZES = (1, 8, 16)


class Clock:
    """Seconds by part; a part within another one counts for itself only."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, float] = defaultdict(float)

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The function, with its time counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent[part] += perf_counter() - start

        return call

    def watch(self, model: Any, cache: DynamicCache) -> None:
        """Time the parts of a model from now on."""
        for module in model.modules():
            if not module._modules and not isinstance(module, torch.nn.Identity):
                linear = isinstance(module, (torch.nn.Linear, PackedLinear))
                module.forward = self.timed(module.forward, "matrix products" if linear else type(module).__name__)
        attention = model.config._attn_implementation
        ALL_ATTENTION_FUNCTIONS.register(attention, self.timed(ALL_ATTENTION_FUNCTIONS[attention], "attention"))
        cache.update = self.timed(cache.update, "cache")  # type: ignore[method-assign]


@torch.no_grad()
def main(
    model: Annotated[str, typer.Option(help="folder or hub id")],
    params: Annotated[float | None, typer.Option("--inflate", help="parameters to grow it to")] = None,
    dtype: str = "bfloat16",
    weights: Annotated[str, typer.Option(help="packed, int8 or dense")] = "packed",
    invariant: Annotated[bool, typer.Option(help="as lade.invariant makes it")] = False,
    cached: Annotated[int, typer.Option(help="tokens in the cache")] = 256,
    rounds: int = 15,
    threads: int = 1,
) -> None:
    torch.set_num_threads(threads)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    loaded = (inflate(loaded, params) if params else loaded).to(getattr(torch, dtype))
    if weights != "dense":
        lade.pack(loaded, weights="int8" if weights == "int8" else None)
    if invariant:
        lade.invariant(loaded)
    cache, vocabulary = DynamicCache(config=loaded.config), loaded.config.vocab_size
    loaded(torch.randint(vocabulary, (1, cached)), **{CACHE: cache})
    clock = Clock()
    clock.watch(loaded, cache)
    found: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    for _ in range(rounds + 1):
        for size, samples in found.items():
            clock.spent.clear()
            start = perf_counter()
            loaded(torch.randint(vocabulary, (1, size)), **{CACHE: cache})
            whole = perf_counter() - start
            cache.crop(-size)
            samples.append({"whole": whole, "the rest": whole - sum(clock.spent.values()), **clock.spent})
    for size, samples in found.items():
        del samples[0]
        parts = {part: 1e3 * median(sample.get(part, 0.0) for sample in samples) for part in samples[0]}
        shown = ", ".join(f"{part} {ms:.1f}" for part, ms in sorted(parts.items(), key=lambda item: -item[1]))
        print(f"{size:2} tokens, ms: {shown}")


if __name__ == "__main__":
    typer.run(main)
