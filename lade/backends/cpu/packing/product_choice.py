"""Choice of the products of packed bfloat16 layers: oneDNN's, or those compiled here if they were measured faster.

The choice is made once for a model's shapes and remembered in the user's cache folder, so that a model has the same
bits at every start on a machine.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import perf_counter

import torch

from lade.backends.cpu.packing.panel_products import panel_for, panel_product
from lade.backends.cpu.packing.panel_weight import PanelWeight
from lade.backends.cpu.packing.panels import TILE_PANEL, in_panels
from lade.backends.cpu.packing.weight import HugePages, packed_weight
from lade.files import Records
from lade.native import processor_name
from lade.version import __version__

logger = logging.getLogger(__name__)

LEAST_WEIGHTS = 2**23
"""Models with fewer weights are not timed: caches hold them, and oneDNN's products have the unpacked layers' bits."""
LARGEST_RATIO = 0.95
"""Largest ratio of the times of own and oneDNN's products at which the own ones are used."""
ROWS = (1, 8)
"""Rows of the products that are timed: a plain step, and one with guesses."""
SHAPES = 4
"""Most shapes that are timed, those with the most weights."""
SECONDS = 0.2
"""Time for each shape, without packing; at least one round more than the first is timed."""
_TRIAL_BYTES = 2**26  # of the weights that pass in turn, more than a core's share of the caches
Shapes = tuple[tuple[int, int, int], ...]
"""Outputs, inputs and number of layers of each shape."""


def faster_panel(shapes: Counter[tuple[int, int]], folder: Path | None = None) -> int:
    """Return the outputs per panel of the faster bfloat16 products, or 0 for oneDNN's.

    Args:
        shapes: number of layers by outputs and inputs.
        folder: folder of remembered choices; None for the user's cache folder.
    """
    panel = panel_for(torch.bfloat16)
    if not panel or sum(outputs * inputs * count for (outputs, inputs), count in shapes.items()) < LEAST_WEIGHTS:
        return 0
    largest = sorted(shapes.items(), key=lambda each: (-each[0][0] * each[0][1] * each[1], each[0]))[:SHAPES]
    most = tuple((outputs, inputs, count) for (outputs, inputs), count in largest)
    return panel * _own_are_faster(most, torch.get_num_threads(), panel, folder)


@cache
def _own_are_faster(shapes: Shapes, threads: int, panel: int, folder: Path | None) -> bool:
    """Return the remembered choice, or measure and remember it."""
    key = {
        "processor": [processor_name(), os.cpu_count()],
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "tiles": panel == TILE_PANEL,
        "threads": threads,
        "shapes": [list(shape) for shape in shapes],
        "lade": __version__,
        "torch": torch.__version__,
    }
    records = Records("products", "the choice of products", folder)
    known = records.load(key)
    if known is None or not isinstance(known.get("own"), bool):
        theirs, own = _measured(shapes, panel)
        known = {"own": own < LARGEST_RATIO * theirs}
        logger.info("bfloat16 products: oneDNN's %.2f ms, own %.2f ms", 1e3 * theirs, 1e3 * own)
        records.save(key, known)
    return bool(known["own"])


@torch.no_grad()
def _measured(shapes: Shapes, panel: int) -> tuple[float, float]:
    """Return the seconds of a model's products, of one row and of several, by oneDNN and by own kernels."""
    theirs = own = 0.0
    for outputs, inputs, count in shapes:
        part = min(outputs, max(TILE_PANEL, _TRIAL_BYTES // (2 * inputs)))  # of a very large weight
        copies = max(1, min(count, _TRIAL_BYTES // (2 * part * inputs)))
        one, other = _timed(part, inputs, copies, panel)
        weights = count * outputs / (copies * part)
        theirs, own = theirs + weights * one, own + weights * other
    return theirs, own


def _timed(outputs: int, inputs: int, copies: int, panel: int) -> tuple[float, float]:
    """Return the least seconds of oneDNN's and of own products with all copies of a weight, summed over `ROWS`."""
    weight, pages = torch.ones(outputs, inputs, dtype=torch.bfloat16, device="cpu"), HugePages()
    blocked, panels = zip(
        *(
            (packed_weight(weight), PanelWeight(in_panels(weight, pages, panel), outputs, inputs))
            for _ in range(copies)
        ),
        strict=True,
    )
    linear = torch.ops.mkldnn._linear_pointwise
    arms: tuple[Callable[[torch.Tensor], object], ...] = (
        lambda x: [linear(x, each, None, "none", [], "") for each in blocked],
        lambda x: [panel_product(x, each, None) for each in panels],
    )
    least: dict[tuple[int, int], float] = {}
    given = [torch.ones(rows, inputs, dtype=torch.bfloat16, device="cpu") for rows in ROWS]
    start, rounds = perf_counter(), 0
    while rounds < 2 or perf_counter() - start < SECONDS:
        for row, x in enumerate(given):
            for arm, product in enumerate(arms):
                began = perf_counter()
                product(x)
                least[arm, row] = min(perf_counter() - began, least.get((arm, row), float("inf")))
        rounds += 1
    one, other = (sum(least[arm, row] for row in range(len(ROWS))) for arm in range(2))
    return one, other
