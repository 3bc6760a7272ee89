"""GEMM with weights in panels: dot products, and the choice between these and tiles."""

from __future__ import annotations

import torch

from lade.backends.cpu.kernels.dot_products import Layout, lay_rows, multiply_few, multiply_many
from lade.backends.cpu.kernels.dots import COLUMNS, DOT_BLOCK, DOT_PANEL, FEW, TOGETHER, has_dots, rows_together
from lade.backends.cpu.kernels.kinds import is_plain, kind_of, refuse
from lade.backends.cpu.kernels.panel_products import PanelProduct
from lade.backends.cpu.kernels.tiles import PANEL, has_tiles
from lade.backends.cpu.packing.tile_products import tile_product
from lade.backends.cpu.worker_threads import in_team

_NEAR, _GROUP = 2**19, 2**18  # bytes of rows and of weights that a core's cache keeps
_MANY_WEIGHTS, _MANY_INPUTS = 2**16, 2**15  # bytes that are worth a thread of their own
_SHARES = 4  # parts for each thread, which may be held up


def dot_product(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Rows `[..., in]` by a weight in panels: `[..., out]`; an output has the same bits beside whatever other rows.

    Args:
        x: bfloat16.
        panels: see `in_panels`, of 16 outputs.
        bias: `[out]`, bfloat16.
        outputs: how many there are.
    """
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype)
    if x.numel():
        _multiply(x, panels, bias, out)
    return out


def _multiply(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As `dot_product`, into `out`."""
    rows = x.numel() // x.shape[-1]
    laid_out = _in_blocks(x, rows)
    count, blocks, *_ = panels.shape
    row_group, panel_group = groups(rows, count, blocks)
    fields = PanelProduct(
        *(laid_out.data_ptr(), 0, panels.data_ptr(), 0),
        *((0, 0) if bias is None else (bias.data_ptr(), kind_of(bias.dtype))),
        *(out.data_ptr(), kind_of(out.dtype), rows, blocks, out.shape[-1], row_group, panel_group),
        *(rows_together(rows), 0),
    )
    parts = -(-rows // row_group) * -(-count // panel_group)
    in_team(multiply_few if rows <= FEW else multiply_many, fields, parts, (laid_out, panels, bias, out))


def _in_blocks(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows in blocks of their inputs, as `Layout` says; a lone row lies so already, if its blocks are whole."""
    inputs = x.shape[-1]
    if rows == 1 and 2 * inputs % DOT_BLOCK == 0:
        return x
    together = rows_together(rows)
    to = x.new_empty(-(-rows // together) * together * -(-2 * inputs // DOT_BLOCK) * (DOT_BLOCK // 2))
    parts = max(1, min(rows, _SHARES * torch.get_num_threads(), 2 * x.numel() // _MANY_INPUTS))
    in_team(lay_rows, Layout(x.data_ptr(), to.data_ptr(), rows, inputs, together), parts, (x, to))
    return to


def groups(rows: int, panels: int, blocks: int) -> tuple[int, int]:
    """How many rows and how many panels make one part of the work."""
    size = blocks * DOT_BLOCK * DOT_PANEL
    if rows <= FEW:
        return rows, max(-(-panels // (_SHARES * torch.get_num_threads())), -(-_MANY_WEIGHTS // size))
    return max(TOGETHER, _NEAR // (blocks * DOT_BLOCK) // TOGETHER * TOGETHER), max(
        COLUMNS, _GROUP // size // COLUMNS * COLUMNS
    )


def panel_for(dtype: torch.dtype) -> int:
    """How many outputs a panel of weights in this dtype has here; 0 if there is no product of our own for it."""
    if dtype not in (torch.bfloat16, torch.int8):
        return 0
    return PANEL if has_tiles() else DOT_PANEL if has_dots(dtype) else 0


def panel_product(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Rows `[..., in]` by a weight in panels, see `in_panels`: `[..., out]`; all in bfloat16, `bias` `[out]`.

    An output has the same bits beside whatever other rows.

    Raises:
        ValueError: any of these is of another dtype, device or shape.
    """
    count, blocks, tiles, columns, inputs = panels.shape
    fits = is_plain(x) and x.dtype == panels.dtype == torch.bfloat16 and x.dim() and -(-x.shape[-1] // inputs) == blocks
    own = bias is None or (is_plain(bias) and bias.dtype == x.dtype and bias.shape == (outputs,))
    if not (fits and own and outputs <= count * tiles * columns):
        takes = f"bfloat16 on the CPU, [..., in] and [out], up to {count * tiles * columns} outputs"
        refuse("the product in panels", takes, x=x, panels=panels, bias=bias)
    product = dot_product if panels.shape[2] == 1 else tile_product
    return product(x, panels, bias, outputs)
