"""Rows quantised to int8 in blocks, and their products with int8 weights in panels: exact sums, scaled and rounded."""

from __future__ import annotations

import torch

from lade.backends.cpu.kernels import address_of, dtype_code, is_plain, kernel, refuse
from lade.backends.cpu.packing.integer_products import ZERO_POINT
from lade.backends.cpu.packing.panels import (
    BLOCK,
    DOT_PANEL,
    TILE_PANEL,
    TILE_ROWS,
    groups,
    parts_of_rows,
    row_groups,
)
from lade.backends.cpu.worker_threads import run_on_team

_NEAR, _GROUP = 2**20, 2**18  # bytes of rows and of weights that stay in a core's cache, with tiles
_MANY_WEIGHTS = 2**16  # least bytes of weights per thread, with tiles
_SHARES = 4  # parts per thread, so that a delayed thread does not hold up the others


def rows_to_quantise(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return inputs `[..., in]` made contiguous, the number of rows, and `in`; see `quantised_in_blocks`."""
    if not (is_plain(x) and x.dim() and x.shape[-1]):
        refuse("rounding to int8", "tensors [..., in] on the CPU", x=x)
    return x.contiguous(), x.numel() // x.shape[-1], x.shape[-1]


def checked_bias(bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor | None:
    """Return a contiguous bias for outputs `[..., out]`; see `int8_panel_product`."""
    if bias is not None and not (is_plain(bias) and bias.shape == (out.shape[-1],)):
        refuse("the product of codes", "a bias [out] on the CPU", out=out, bias=bias)
    return None if bias is None else bias.contiguous()


def quantised_in_blocks(x: torch.Tensor, panel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise inputs like `quantised`, in the blocked layout that panels of weights need.

    Args:
        x: `[..., in]`, float32, bfloat16 or float16.
        panel: outputs per panel. For AMX tiles, codes are signed, 16 rows are interleaved, and the number of rows is
            padded to a multiple of 32 if there are more than 16; for dot products, codes are unsigned.

    Returns:
        Codes `[rows / together, blocks, together, 64]` int8, the last block padded with zeros and the last group with
            rows that are not written, and the rows' scales, `[rows]` float32.

    Raises:
        ValueError: x has another dtype or device, or no inputs.
    """
    x, rows, inputs = rows_to_quantise(x)
    if panel == TILE_PANEL:
        together, step, zero = min(rows, TILE_ROWS), rows if rows <= TILE_ROWS else 2 * TILE_ROWS, 0
    else:
        together = step = row_groups().together_for(rows)
        zero = ZERO_POINT
    codes = torch.empty(-(-rows // max(1, step)) * step * -(-inputs // BLOCK) * BLOCK, dtype=torch.int8)
    scales = torch.empty(rows)
    fields = x.data_ptr(), dtype_code(x.dtype), codes.data_ptr(), scales.data_ptr(), rows, inputs, together, zero, 0
    run_on_team(kernel("quantise_rows"), fields, parts_of_rows(rows, x.numel()), (x, codes, scales))
    return codes, scales


def initial_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the initial sums of weights `[out, in]` for inputs with zero point 128, `[out padded]` int32."""
    sums = values.sum(-1, dtype=torch.int32).mul_(-ZERO_POINT)
    return torch.nn.functional.pad(sums, (0, -len(values) % DOT_PANEL))


def int8_panel_product(
    codes: torch.Tensor,
    scales: torch.Tensor,
    panels: torch.Tensor,
    start: torch.Tensor,
    steps: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    instructions: str = "",
) -> torch.Tensor:
    """Multiply int8 codes by weights in panels: integer sums, scaled by outputs and rows, plus the bias.

    Args:
        codes: codes of the rows from `quantised_in_blocks`, for the same panel width.
        scales: `[rows]` float32, scales of the rows.
        panels: int8 weights from `in_panels`.
        start: initial sums from `initial_sums`; unused by tiles.
        steps: `[out]` float32, scales of the weights.
        bias: `[out]`, in any dtype that inputs may have; None for none.
        out: `[..., out]`, contiguous, in any dtype that inputs may have; written in place.
        instructions: instructions of the kernel, see `kernel`.

    Returns:
        The tensor `out`.

    Raises:
        ValueError: the bias has another dtype, device or shape.
    """
    bias = checked_bias(bias, out)
    rows = scales.numel()
    if not rows:
        return out
    count, blocks, tiles, *_ = panels.shape
    if tiles == 1:
        few, together, suffix = row_groups().sizes[-1], row_groups().together_for(rows), ""
        row_group, panel_group = groups(rows, count, blocks)
    else:
        few, together, suffix = TILE_ROWS, min(rows, TILE_ROWS), "_by_tiles"
        row_group, panel_group = _tile_groups(rows, count, blocks)
    fields = (  # a PanelProduct, see cpu_panels.h
        *(codes.data_ptr(), scales.data_ptr(), panels.data_ptr(), steps.data_ptr()),
        *(address_of(bias), 0 if bias is None else dtype_code(bias.dtype), out.data_ptr(), dtype_code(out.dtype)),
        *(rows, blocks, out.shape[-1], row_group, panel_group, together, start.data_ptr()),
    )
    name = f"multiply_{'few' if rows <= few else 'many'}_codes{suffix}"
    parts = -(-rows // row_group) * -(-count // panel_group)
    run_on_team(kernel(name, instructions), fields, parts, (codes, scales, panels, start, steps, bias, out))
    return out


def _tile_groups(rows: int, panels: int, blocks: int) -> tuple[int, int]:
    """Return the rows and panels per part of the work, for tiles."""
    size, threads = blocks * BLOCK * TILE_PANEL, torch.get_num_threads()
    if rows <= TILE_ROWS:
        return rows, max(-(-panels // (_SHARES * threads)), -(-_MANY_WEIGHTS // size))
    step = 2 * TILE_ROWS
    return max(step, _NEAR // (blocks * BLOCK) // step * step), max(1, _GROUP // size)
