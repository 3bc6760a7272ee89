"""Products of bfloat16 rows by weights in panels, by AMX tiles or dot products, and the choice of them or oneDNN's.

Tiles are compared with their definition at first use. The choice is made once for a model's shapes and remembered in
the user's cache folder, so that a model has the same bits at every start on a machine.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from time import perf_counter

import torch

from lade.announcements import announce_once
from lade.backends.cpu.kernels import address_of, kernel, run_on_team
from lade.backends.cpu.packing.weight import (
    BLOCK,
    DOT_PANEL,
    TILE_PANEL,
    TILE_ROWS,
    HugePages,
    PanelWeight,
    has_dots,
    in_panels,
    packed_weight,
)
from lade.files import Records
from lade.native import processor_name
from lade.version import __version__

logger = logging.getLogger(__name__)

_BLOCK_INPUTS = BLOCK // 2
_MANY = 2**16  # least weights per part
_CHUNK = 64  # blocks of inputs that pass through all panels together
_NEAR_ROWS = 2**20  # bytes of the rows' inputs in a chunk that fit into the L2 cache alongside weights
_SQUARE_ROWS, _SQUARE_OUTPUTS = 2 * TILE_ROWS, TILE_PANEL // 2  # rows and outputs of four tiles of sums
_TRIAL = ((1, 70, 100), (16, 64, 64), (17, 33, 45), (40, 130, 2100))  # rows, outputs and inputs


def panel_for(dtype: torch.dtype) -> int:
    """Return the outputs per panel for weights of a dtype; 0 if this processor has no panel kernel for it."""
    if dtype != torch.bfloat16:
        return 0
    return TILE_PANEL if has_tiles() else DOT_PANEL if has_dots() else 0


def panel_product(x: torch.Tensor, weight: PanelWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return bfloat16 rows `[..., in]` times a weight in panels of any width; no row depends on the others.

    Raises `ValueError` for another dtype, device or shape.
    """
    if weight.panels.shape[2] == 1:
        return weight.product(x, bias)
    weight.check(x, bias)
    return tile_product(x, weight.panels, bias, weight.outputs)


@cache
def has_tiles() -> bool:
    """Return True if there are kernels with AMX tiles, and these compute what tiles are defined to.

    The comparison takes milliseconds, once per process. If the products differ by more than the order of sums allows,
    one line says so, and other instructions are used.
    """
    if not kernel("multiply_few_by_tiles", "amx").available:
        return False
    agree = all(_products_agree(*shape) for shape in _TRIAL)
    if not agree:
        announce_once(logger, "AMX tiles give wrong results on this machine: other kernels are used instead")
    return agree


def _products_agree(rows: int, outputs: int, inputs: int, instructions: str = "amx") -> bool:
    """Return True if products by tiles are near those of the reference."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inputs, generator=generator, dtype=torch.float32, device="cpu").bfloat16()
    values = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int64, device="cpu")
    panels = in_panels(values.bfloat16())
    found, expected = (tile_product(x, panels, None, outputs, each).float() for each in (instructions, "reference"))
    size = torch.linalg.vector_norm(x.float(), dim=-1, keepdim=True) * values.float().norm(dim=-1)  # [rows, outputs]
    return bool(((found - expected).abs() <= 2**-7 * size).all())


def tile_product(
    x: torch.Tensor,  # [..., in] bfloat16
    panels: torch.Tensor,  # bfloat16, from `in_panels`, with 64 outputs per panel
    bias: torch.Tensor | None,  # [out] bfloat16
    outputs: int,  # without padding
    instructions: str = "",  # see `kernel`
) -> torch.Tensor:
    """Multiply rows by weights, `[..., out]`; an output does not depend on the other rows."""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    rows, most = x.numel() // x.shape[-1], _NEAR_ROWS // (BLOCK * min(panels.shape[1], _CHUNK))
    parts = x.view(rows, x.shape[-1]).split(most), out.view(rows, outputs).split(most)
    for some, found in zip(*parts, strict=True):
        if len(some):
            _multiply(some, panels, bias, found, instructions)
    return out


def _multiply(
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, instructions: str
) -> None:
    """Compute `tile_product` of `[rows, in]` into `out`, for few enough rows to stay in the cache."""
    (rows, inputs), outputs, blocks = x.shape, out.shape[-1], panels.shape[1]
    chunk, left = min(blocks, _CHUNK), inputs % _BLOCK_INPUTS
    # The inputs after the last whole block are padded with zeros, since kernels must not read past a row.
    rest = torch.nn.functional.pad(x[:, -left:], (0, _BLOCK_INPUTS - left)) if left else None
    squares = -(-rows // _SQUARE_ROWS) * -(-outputs // _SQUARE_OUTPUTS)
    partial = None
    if rows > TILE_ROWS and chunk < blocks:
        partial = torch.empty(squares * _SQUARE_ROWS * _SQUARE_OUTPUTS, dtype=torch.float32, device="cpu")
    holds = (x, rest, panels, bias, out, partial)
    most = min(panels.shape[0], -(-panels.numel() // _MANY))
    name = "multiply_few_by_tiles" if rows <= TILE_ROWS else "multiply_many_by_tiles"
    fields = *map(address_of, holds), rows, inputs, outputs, chunk
    run_on_team(kernel(name, instructions), fields, min(most, torch.get_num_threads()))


RECORDS = Records("products", "the choice of products")
LEAST_WEIGHTS = 2**23
"""Models with fewer weights are not timed: caches hold them, and oneDNN's products have the unpacked layers' bits."""
LARGEST_RATIO = 0.95  # largest ratio of the times of own and oneDNN's products at which the own ones are used
ROWS = (1, 8)  # rows of the products that are timed: a plain step, and one with guesses
SHAPES = 4  # most shapes that are timed, those with the most weights
SECONDS = 0.2  # time for each shape, without packing; at least one round more than the first is timed
_TRIAL_BYTES = 2**26  # of the weights that pass in turn, more than a core's share of the caches
Shapes = tuple[tuple[int, int, int], ...]  # outputs, inputs and number of layers of each shape


def faster_panel(shapes: Counter[tuple[int, int]]) -> int:
    """Return the outputs per panel of the faster bfloat16 products, or 0 for oneDNN's, given layers by their shape."""
    panel = panel_for(torch.bfloat16)
    if not panel or sum(outputs * inputs * count for (outputs, inputs), count in shapes.items()) < LEAST_WEIGHTS:
        return 0
    largest = sorted(shapes.items(), key=lambda each: (-each[0][0] * each[0][1] * each[1], each[0]))[:SHAPES]
    most = tuple((outputs, inputs, count) for (outputs, inputs), count in largest)
    return panel * _own_are_faster(most, torch.get_num_threads(), panel)


@cache
def _own_are_faster(shapes: Shapes, threads: int, panel: int) -> bool:
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
    own = RECORDS.load(key, lambda record: bool(record["own"]))
    if own is None:
        theirs_s, own_s = _measured(shapes, panel)
        own = own_s < LARGEST_RATIO * theirs_s
        logger.info("bfloat16 products: oneDNN's %.2f ms, own %.2f ms", 1e3 * theirs_s, 1e3 * own_s)
        RECORDS.save(key, {"own": own})
    return own


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
    blocked = [packed_weight(weight) for _ in range(copies)]
    panels = [PanelWeight(in_panels(weight, pages, panel), outputs, inputs) for _ in range(copies)]
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
