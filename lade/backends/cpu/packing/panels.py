"""Weights in panels, and the groups in which rows pass through them; drawings are in `lade/native/cpu_dots.h`."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lade.backends.cpu.kernels import kernel
from lade.backends.cpu.packing.weight import HugePages

BLOCK = 64
"""Bytes of consecutive inputs, of one row or one output, in a block."""
DOT_PANEL, TILE_PANEL = 16, 64
"""Outputs per panel of dot products, and of AMX tiles."""
TILE_ROWS = 16
"""Rows of a tile."""
_WORD = 4  # bytes of the inputs of an output that an instruction adds up
_COLUMNS = BLOCK // _WORD  # outputs of a tile, or of a line of a panel
_NEAR, _GROUP = 2**19, 2**18  # bytes of rows and of weights that stay in a core's cache
_MANY_WEIGHTS, _MANY_INPUTS = 2**16, 2**12  # least bytes of weights, and least inputs, per thread
_SHARES = 4  # parts per thread, so that a delayed thread does not hold up the others


class RowGroups(NamedTuple):
    """Numbers of rows that pass through panels together.

    Attributes:
        sizes: ascending; few rows, up to the last of them, make one group of the least that holds them.
        together: rows per group if there are more.
        columns: panels that such a group passes through at a time.
    """

    sizes: tuple[int, ...]
    together: int
    columns: int

    def together_for(self, rows: int) -> int:
        """Return the rows interleaved in a group, for a product of `rows` rows; the last group may be padded."""
        return next((size for size in self.sizes if rows <= size), self.together)


DOT_GROUPS = RowGroups((1, 2, 4, 6, 8, 12, 16, 24), 8, 2)
"""Groups of dot products."""


def has_dots() -> bool:
    """Return True if there are dot products of bfloat16, which need AVX512-BF16."""
    return kernel("multiply_few").available


def groups(rows: int, panels: int, blocks: int) -> tuple[int, int]:
    """Return the rows and panels per part of the work, for dot products."""
    size, (sizes, together, columns) = blocks * BLOCK * DOT_PANEL, DOT_GROUPS
    if rows <= sizes[-1]:
        return rows, max(-(-panels // (_SHARES * torch.get_num_threads())), -(-_MANY_WEIGHTS // size))
    return max(together, _NEAR // (blocks * BLOCK) // together * together), max(
        columns, _GROUP // size // columns * columns
    )


def parts_of_rows(rows: int, inputs: int) -> int:
    """Return the parts in which rows are laid out in blocks.

    Args:
        rows: number of rows.
        inputs: numbers of all rows together.
    """
    return max(1, min(rows, _SHARES * torch.get_num_threads(), inputs // _MANY_INPUTS))


def in_panels(weight: torch.Tensor, pages: HugePages | None = None, panel: int = TILE_PANEL) -> torch.Tensor:
    """Return a weight `[out, in]` in panels, padded with zeros.

    A panel's block of 32 inputs is one or more tiles of 16 outputs; a row of a tile holds the same two inputs of each
    output in turn.

    Args:
        weight: `[out, in]` bfloat16, left unchanged.
        pages: memory pool to allocate from; None for ordinary memory.
        panel: outputs per panel, a multiple of 16: `TILE_PANEL` or `DOT_PANEL`.

    Returns:
        `[out / panel, in / block, panel / 16, 16, block]`, bfloat16.
    """
    outputs, inputs = weight.shape
    block = BLOCK // weight.element_size()
    filled = torch.nn.functional.pad(weight, (0, -inputs % block, 0, -outputs % panel)).contiguous()
    words = filled.view(torch.int32).view(-1, panel // _COLUMNS, _COLUMNS, filled.shape[1] // block, _COLUMNS)
    words = words.permute(0, 3, 1, 4, 2)
    room = (
        pages.take(filled.nbytes) if pages is not None else torch.empty(filled.nbytes, dtype=torch.int8, device="cpu")
    )
    return room.view(torch.int32).view(words.shape).copy_(words).view(weight.dtype)


def out_of_panels(panels: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Invert `in_panels`: return the weight `[out, in]`."""
    words = panels.view(torch.int32).permute(0, 2, 4, 1, 3)
    filled = words.reshape(panels.shape[2] * _COLUMNS * len(panels), -1).contiguous().view(panels.dtype)
    return filled[:outputs, :inputs].contiguous()
