"""Int8 codes by dot products, for processors that have them (VNNI): rounded, and multiplied with weights in panels.

What comes out has the bits of products by oneDNN: integer sums are exact, and the rest is rounded in the same steps.
"""

from __future__ import annotations

import torch

from lade.model.kernels.dot_code_products import multiply_few_codes, multiply_many_codes
from lade.model.kernels.dots import DOT_PANEL, FEW, DotProduct, rows_together
from lade.model.kernels.kinds import kind_of
from lade.model.packing.codes import ZERO_POINT
from lade.model.packing.dots import groups
from lade.model.packing.row_codes import coded
from lade.model.worker_threads import in_team


def coded_for_dots(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `coded`: unsigned codes."""
    rows = x.numel() // x.shape[-1]
    together = rows_together(rows)
    return coded(x, together, -(-rows // together) * together, ZERO_POINT)


def first_sums(values: torch.Tensor) -> torch.Tensor:
    """What the sums of weights `[out, in]` begin with, as inputs of zero are 128: `[out / 16 * 16]` int32."""
    sums = values.sum(-1, dtype=torch.int32).mul_(-ZERO_POINT)
    return torch.nn.functional.pad(sums, (0, -len(values) % DOT_PANEL))


def multiplied_by_dots(
    codes: torch.Tensor,
    scales: torch.Tensor,
    panels: torch.Tensor,
    start: torch.Tensor,
    steps: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Integer sums, times the scales of outputs and of rows, plus the bias.

    Args:
        codes: of `coded_for_dots`.
        scales: likewise.
        panels: of `in_panels`, of 16 outputs.
        start: of `first_sums`.
        steps: `[out]` float32, of the weights.
        bias: `[out]`, in one of the dtypes of inputs.
        out: `[..., out]`, contiguous, in one of these dtypes: is filled in.

    Returns:
        `out`.
    """
    rows = scales.numel()
    if not rows:
        return out
    count, blocks, *_ = panels.shape
    bias = None if bias is None else bias.contiguous()
    row_group, panel_group = groups(rows, count, blocks)
    fields = DotProduct(
        *(codes.data_ptr(), rows_together(rows), panels.data_ptr(), start.data_ptr(), scales.data_ptr()),
        *(steps.data_ptr(), *((0, 0) if bias is None else (bias.data_ptr(), kind_of(bias.dtype)))),
        *(out.data_ptr(), kind_of(out.dtype), rows, blocks, out.shape[-1], row_group, panel_group),
    )
    parts = -(-rows // row_group) * -(-count // panel_group)
    holds = codes, scales, panels, start, steps, bias, out
    in_team(multiply_few_codes if rows <= FEW else multiply_many_codes, fields, parts, holds)
    return out
