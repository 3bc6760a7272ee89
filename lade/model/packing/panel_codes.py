"""Int8 codes by products of our own: rounded, laid out for them, and multiplied with weights in panels.

What comes out has the bits of products by oneDNN: integer sums are exact, and the rest is rounded in the same steps.
"""

from __future__ import annotations

import torch

from lade.model.kernels import dot_products, tile_code_products
from lade.model.kernels.codes import CODES, Coding, code_rows
from lade.model.kernels.dots import DOT_PANEL, FEW, rows_together
from lade.model.kernels.kinds import is_plain, kind_of, refuse
from lade.model.kernels.panel_products import PanelProduct
from lade.model.kernels.tiles import PANEL, ROWS
from lade.model.packing.codes import ZERO_POINT
from lade.model.packing.dots import groups
from lade.model.worker_threads import in_team

_NEAR, _GROUP = 2**20, 2**18  # bytes of rows and of weights that a core's cache keeps beside tiles
_MANY_WEIGHTS, _MANY_INPUTS = 2**16, 2**15  # that are worth a thread of their own
_SHARES = 4  # parts for each thread, which may be held up


def coded(x: torch.Tensor, panel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round inputs as `quantised` in codes.py does, and lay them out for weights in panels.

    Args:
        x: `[..., in]`, float32, bfloat16 or float16.
        panel: outputs of a panel. For tiles codes are signed, 16 rows lie together, and there is room for a multiple of
            32 where there are more; for dot products they are unsigned.

    Returns:
        Codes as `Coding` lays them out, and what a step of each row is worth, `[rows]` float32.

    Raises:
        ValueError: x is of another dtype or on another device, or has no inputs.
    """
    if not (is_plain(x) and x.dim() and x.shape[-1]):
        refuse("rounding to int8", "tensors [..., in] on the CPU", x=x)
    x, inputs = x.contiguous(), x.shape[-1]
    rows = x.numel() // inputs
    if panel == PANEL:
        together, step, zero = min(rows, ROWS), rows if rows <= ROWS else 2 * ROWS, 0
    else:
        together = step = rows_together(rows)
        zero = ZERO_POINT
    codes = torch.empty(-(-rows // max(1, step)) * step * -(-inputs // CODES) * CODES, dtype=torch.int8)
    scales = torch.empty(rows)
    places = x.data_ptr(), kind_of(x.dtype), codes.data_ptr(), scales.data_ptr()
    parts = max(1, min(rows, _SHARES * torch.get_num_threads(), x.numel() // _MANY_INPUTS))
    in_team(code_rows, Coding(*places, rows, inputs, together, zero), parts, (x, codes, scales))
    return codes, scales


def first_sums(values: torch.Tensor) -> torch.Tensor:
    """What the sums of weights `[out, in]` begin with where inputs of zero are 128: `[out filled up]` int32."""
    sums = values.sum(-1, dtype=torch.int32).mul_(-ZERO_POINT)
    return torch.nn.functional.pad(sums, (0, -len(values) % DOT_PANEL))


def multiplied_in_panels(
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
        codes: of `coded`, for panels of as many outputs.
        scales: likewise.
        panels: of `in_panels`.
        start: of `first_sums`; unused by tiles.
        steps: `[out]` float32, of the weights.
        bias: `[out]`, in one of the dtypes of inputs.
        out: `[..., out]`, contiguous, in one of these dtypes: is filled in.

    Returns:
        `out`.

    Raises:
        ValueError: the bias is of another dtype, device or shape.
    """
    if bias is not None and not (is_plain(bias) and bias.shape == (out.shape[-1],)):
        refuse("the product of codes", "a bias [out] on the CPU", out=out, bias=bias)
    rows = scales.numel()
    if not rows:
        return out
    count, blocks, tiles, *_ = panels.shape
    if tiles == 1:
        few, together = FEW, rows_together(rows)
        kernels = dot_products.multiply_few_codes, dot_products.multiply_many_codes
        row_group, panel_group = groups(rows, count, blocks)
    else:
        few, together = ROWS, min(rows, ROWS)
        kernels = tile_code_products.multiply_few_codes, tile_code_products.multiply_many_codes
        row_group, panel_group = _tile_groups(rows, count, blocks)
    bias = None if bias is None else bias.contiguous()
    fields = PanelProduct(
        *(codes.data_ptr(), scales.data_ptr(), panels.data_ptr(), steps.data_ptr()),
        *((0, 0) if bias is None else (bias.data_ptr(), kind_of(bias.dtype))),
        *(out.data_ptr(), kind_of(out.dtype), rows, blocks, out.shape[-1], row_group, panel_group),
        *(together, start.data_ptr()),
    )
    parts = -(-rows // row_group) * -(-count // panel_group)
    in_team(kernels[rows > few], fields, parts, (codes, scales, panels, start, steps, bias, out))
    return out


def _tile_groups(rows: int, panels: int, blocks: int) -> tuple[int, int]:
    """How many rows and how many panels make one part of the work in tiles."""
    size, threads = blocks * CODES * PANEL, torch.get_num_threads()
    if rows <= ROWS:
        return rows, max(-(-panels // (_SHARES * threads)), -(-_MANY_WEIGHTS // size))
    step = 2 * ROWS
    return max(step, _NEAR // (blocks * CODES) // step * step), max(1, _GROUP // size)
