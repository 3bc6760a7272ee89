"""What all examples end with: the same call plain and with the recipe, compared and timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import lade
from lade.embedded import model_path
from lade.recipe import recipe_path

MODEL = sys.argv[1] if len(sys.argv) > 1 else str(model_path())
DTYPE = "auto" if len(sys.argv) > 1 else "float32"  # 16 bits, as checkpoints have them, may diverge at near ties
RECIPE = {"custom_generate": str(recipe_path()), "trust_remote_code": True}
"""Any folder that `lade export-recipe DIR` wrote is as good as the one in the package."""


def compare(run: Callable[..., str]) -> None:
    """Print the text and both times; `run(**further)` hands on further arguments to `generate`.

    Three calls: the first one with the recipe is not counted, since it may compile, and measure what a step costs here.
    """
    run(**RECIPE)
    stats = lade.Stats()
    plain, plain_s = _timed(run)
    text, seconds = _timed(run, **RECIPE, stats=stats)
    print(text)
    print(f"\nThe text is {'the same as' if text == plain else 'NOT'} that of plain generate.")
    print(f"{plain_s:.2f} s plainly, {seconds:.2f} s with lookahead: {plain_s / seconds:.2f} times the speed")
    if stats.steps:
        print(f"{stats.new_tokens} tokens in {stats.steps} steps: {stats.tokens_per_step:.2f} tokens per step")


def _timed(run: Callable[..., str], **further: Any) -> tuple[str, float]:
    begin = time.perf_counter()
    text = run(**further)
    return text, time.perf_counter() - begin
