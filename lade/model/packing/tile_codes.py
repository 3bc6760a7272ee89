"""Int8 codes in tiles, for processors that have them (AMX): inputs rounded, and multiplied with weights in panels.

What comes out has the bits of products by oneDNN: integer sums are exact, and the rest is rounded in the same steps.
"""

from __future__ import annotations

import torch

from lade.model.kernels.code_products import CodeProduct
from lade.model.kernels.codes import CODES
from lade.model.kernels.kinds import kind_of
from lade.model.kernels.tile_code_products import multiply_few_codes, multiply_many_codes
from lade.model.kernels.tiles import PANEL, ROWS
from lade.model.packing.row_codes import coded
from lade.model.worker_threads import in_team

_NEAR, _GROUP = 2**20, 2**18  # bytes of rows and of weights that a core's cache keeps
_MANY_WEIGHTS = 2**16  # that are worth a thread of their own
_SHARES = 4  # parts for each thread, which may be held up


def coded_for_tiles(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `coded`: signed codes, 16 rows together, with room for a multiple of 32 where there are more."""
    rows = x.numel() // x.shape[-1]
    return coded(x, min(rows, ROWS), rows if rows <= ROWS else -(-rows // (2 * ROWS)) * 2 * ROWS, 0)


def multiplied_in_tiles(
    codes: torch.Tensor,
    scales: torch.Tensor,
    panels: torch.Tensor,
    steps: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Integer sums, times the scales of outputs and of rows, plus the bias.

    Args:
        codes: of `coded_for_tiles`.
        scales: likewise.
        panels: of `in_panels`.
        steps: `[out]` float32, of the weights.
        bias: `[out]`, in one of the dtypes of inputs.
        out: `[..., out]`, contiguous, in one of these dtypes: is filled in.

    Returns:
        `out`.
    """
    count, blocks, *_ = panels.shape
    rows = scales.numel()
    if not rows:
        return out
    bias = None if bias is None else bias.contiguous()
    row_group, panel_group = _groups(rows, count, blocks)
    fields = CodeProduct(
        *(codes.data_ptr(), scales.data_ptr(), panels.data_ptr(), steps.data_ptr()),
        *((0, 0) if bias is None else (bias.data_ptr(), kind_of(bias.dtype))),
        *(out.data_ptr(), kind_of(out.dtype), rows, blocks, out.shape[-1], row_group, panel_group),
    )
    parts = -(-rows // row_group) * -(-count // panel_group)
    holds = codes, scales, panels, steps, bias, out
    in_team(multiply_few_codes if rows <= ROWS else multiply_many_codes, fields, parts, holds)
    return out


def _groups(rows: int, panels: int, blocks: int) -> tuple[int, int]:
    """How many rows and how many panels make one part of the work."""
    size, threads = blocks * CODES * PANEL, torch.get_num_threads()
    if rows <= ROWS:
        return rows, max(-(-panels // (_SHARES * threads)), -(-_MANY_WEIGHTS // size))
    step = 2 * ROWS
    return max(step, _NEAR // (blocks * CODES) // step * step), max(1, _GROUP // size)
