"""Products of bfloat16 rows by weights in panels: by AMX tiles or by dot products, whichever the processor has."""

from __future__ import annotations

import torch

from lade.backends.cpu.packing.panel_weight import PanelWeight
from lade.backends.cpu.packing.panels import DOT_PANEL, TILE_PANEL, has_dots
from lade.backends.cpu.packing.tile_products import has_tiles, tile_product


def panel_for(dtype: torch.dtype) -> int:
    """Return the outputs per panel for weights of a dtype; 0 if this processor has no panel kernel for it."""
    if dtype not in (torch.bfloat16, torch.int8):
        return 0
    return TILE_PANEL if has_tiles() else DOT_PANEL if has_dots(dtype) else 0


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
