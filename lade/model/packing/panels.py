"""The layout of weights for products of our own: panels of some outputs, which are read first byte to last."""

from __future__ import annotations

import torch

from lade.model.kernels.tiles import PANEL, ROWS
from lade.model.packing.huge_pages import HugePages

_LINE, _WORD = 64, 4  # bytes of a tile's row, and of one output's inputs in it


def in_panels(weight: torch.Tensor, pages: HugePages | None = None, panel: int = PANEL) -> torch.Tensor:
    """A weight `[out, in]` as panels, filled up with zeros.

    A panel's block of inputs, 32 in bfloat16 and 64 in int8, is one or more tiles of 16 outputs; a row of a tile holds
    the same two or four inputs of each of them, one behind the other.

    Args:
        weight: bfloat16 or int8; is left as it is.
        pages: what memory for them is taken from.
        panel: outputs of a panel, a multiple of 16: 64 as `kernels.tiles` reads them, 16 as `kernels.dots` does.

    Returns:
        `[out / panel, in / block, panel / 16, 16, block]`, of the weight's dtype.
    """
    outputs, inputs = weight.shape
    block = _LINE // weight.element_size()
    filled = torch.nn.functional.pad(weight, (0, -inputs % block, 0, -outputs % panel)).contiguous()
    words = filled.view(torch.int32).view(-1, panel // ROWS, ROWS, filled.shape[1] // block, _LINE // _WORD)
    words = words.permute(0, 3, 1, 4, 2)
    room = pages.take(filled.nbytes) if pages is not None else torch.empty(filled.nbytes, dtype=torch.int8)
    return room.view(torch.int32).view(words.shape).copy_(words).view(weight.dtype)


def out_of_panels(panels: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """The weight `[out, in]` that `in_panels` was given."""
    words = panels.view(torch.int32).permute(0, 2, 4, 1, 3)
    filled = words.reshape(panels.shape[2] * ROWS * len(panels), -1).contiguous().view(panels.dtype)
    return filled[:outputs, :inputs].contiguous()
