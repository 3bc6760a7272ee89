"""Products of bfloat16 rows by weights in panels: by AMX tiles or by dot products, whichever the processor has.

Tiles are compared with their definition at first use.
"""

from __future__ import annotations

import logging
from functools import cache

import torch

from lade.announcements import announce_once
from lade.backends.cpu.kernels import address_of, kernel
from lade.backends.cpu.packing.panel_weight import PanelWeight
from lade.backends.cpu.packing.panels import BLOCK, DOT_PANEL, TILE_PANEL, TILE_ROWS, has_dots, in_panels
from lade.backends.cpu.worker_threads import run_on_team

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
    """Multiply rows `[..., in]` by a bfloat16 weight in panels; an output does not depend on the other rows.

    Args:
        x: `[..., in]` bfloat16, on the CPU.
        weight: bfloat16 weight in panels of any width.
        bias: `[out]` bfloat16; None for none.

    Returns:
        `[..., out]` bfloat16.

    Raises:
        ValueError: an argument has another dtype, device or shape.
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
    x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, outputs: int, instructions: str = ""
) -> torch.Tensor:
    """Multiply rows `[..., in]` by weights in panels of 64 outputs; an output does not depend on the other rows.

    Args:
        x: `[..., in]` bfloat16.
        panels: bfloat16 weights from `in_panels`, with 64 outputs per panel.
        bias: `[out]` bfloat16; None for none.
        outputs: number of outputs, without padding.
        instructions: instructions of the kernel, see `kernel`.

    Returns:
        `[..., out]` bfloat16.
    """
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
    partial = (
        None
        if rows <= TILE_ROWS or chunk == blocks
        else torch.empty(squares * _SQUARE_ROWS * _SQUARE_OUTPUTS, dtype=torch.float32, device="cpu")
    )
    holds = (x, rest, panels, bias, out, partial)
    most = min(panels.shape[0], -(-panels.numel() // _MANY))
    name = "multiply_few_by_tiles" if rows <= TILE_ROWS else "multiply_many_by_tiles"
    fields = *map(address_of, holds), rows, inputs, outputs, chunk
    run_on_team(kernel(name, instructions), fields, min(most, torch.get_num_threads()))
