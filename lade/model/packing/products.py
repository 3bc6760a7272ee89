"""Products of our own: which this processor has, for weights in which panels."""

from __future__ import annotations

import torch

from lade.model.kernels.dots import DOT_PANEL, has_dots
from lade.model.kernels.kinds import is_plain, refuse
from lade.model.kernels.tiles import PANEL, has_tiles
from lade.model.packing.dots import dot_product
from lade.model.packing.tiles import tile_product


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
