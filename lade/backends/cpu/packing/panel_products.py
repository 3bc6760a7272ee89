"""Products of bfloat16 rows by weights in panels: by AMX tiles or by dot products, whichever the processor has."""

from __future__ import annotations

import torch

from lade.backends.cpu.kernels import address_of, dtype_code, is_plain, kernel, refuse
from lade.backends.cpu.packing.panels import (
    BLOCK,
    DOT_PANEL,
    TILE_PANEL,
    groups,
    has_dots,
    parts_of_rows,
    row_groups,
)
from lade.backends.cpu.packing.tile_products import has_tiles, tile_product
from lade.backends.cpu.worker_threads import run_on_team


def panel_for(dtype: torch.dtype) -> int:
    """Return the outputs per panel for weights of a dtype; 0 if this processor has no panel kernel for it."""
    if dtype not in (torch.bfloat16, torch.int8):
        return 0
    return TILE_PANEL if has_tiles() else DOT_PANEL if has_dots(dtype) else 0


def panel_product(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Multiply rows `[..., in]` by weights in panels; an output does not depend on the other rows.

    Args:
        x: `[..., in]` bfloat16, on the CPU.
        panels: bfloat16 weights from `in_panels`.
        bias: `[out]` bfloat16; None for none.
        outputs: number of outputs, without padding.

    Returns:
        `[..., out]` bfloat16.

    Raises:
        ValueError: an argument has another dtype, device or shape.
    """
    count, blocks, tiles, columns, inputs = panels.shape
    fits = is_plain(x) and x.dtype == panels.dtype == torch.bfloat16 and x.dim() and -(-x.shape[-1] // inputs) == blocks
    own = bias is None or (is_plain(bias) and bias.dtype == x.dtype and bias.shape == (outputs,))
    if not (fits and own and outputs <= count * tiles * columns):
        takes = f"bfloat16 on the CPU, [..., in] and [out], up to {count * tiles * columns} outputs"
        refuse("the panel product", takes, x=x, panels=panels, bias=bias)
    product = dot_product if panels.shape[2] == 1 else tile_product
    return product(x, panels, bias, outputs)


def dot_product(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Multiply rows `[..., in]` by weights in panels of 16 outputs; an output does not depend on the other rows.

    Args:
        x: `[..., in]` bfloat16.
        panels: bfloat16 weights from `in_panels`, with 16 outputs per panel.
        bias: `[out]` bfloat16; None for none.
        outputs: number of outputs, without padding.

    Returns:
        `[..., out]` bfloat16.
    """
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype)
    if x.numel():
        _multiply(x, panels, bias, out)
    return out


def _multiply(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Compute `dot_product` into `out`."""
    rows, (count, blocks, *_) = x.numel() // x.shape[-1], panels.shape
    laid_out, together = _in_blocks(x, rows), row_groups().together_for(rows)
    row_group, panel_group = groups(rows, count, blocks)
    kind = dtype_code(x.dtype)
    fields = (  # a PanelProduct, see cpu_panels.h
        *(laid_out.data_ptr(), 0, panels.data_ptr(), 0, address_of(bias), kind, out.data_ptr(), kind),
        *(rows, blocks, out.shape[-1], row_group, panel_group, together, 0),
    )
    parts = -(-rows // row_group) * -(-count // panel_group)
    name = "multiply_few" if rows <= row_groups().sizes[-1] else "multiply_many"
    run_on_team(kernel(name), fields, parts, (laid_out, panels, bias, out))


def _in_blocks(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Lay rows out in blocks, see cpu_panels.h; a single row whose last block is full already has this layout."""
    inputs = x.shape[-1]
    if rows == 1 and 2 * inputs % BLOCK == 0:
        return x
    together = row_groups().together_for(rows)
    to = x.new_empty(-(-rows // together) * together * -(-2 * inputs // BLOCK) * (BLOCK // 2))
    fields = x.data_ptr(), to.data_ptr(), rows, inputs, together
    run_on_team(kernel("block_rows"), fields, parts_of_rows(rows, 2 * x.numel()), (x, to))
    return to
