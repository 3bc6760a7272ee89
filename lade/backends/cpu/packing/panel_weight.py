"""Weights in panels and their products with rows, which are laid out in blocks, or rounded to int8, in the same call.

A product of a few rows with a small weight takes some 10 us, as long as a few calls of Python. So what calls have in
common, such as how their work is split, is prepared once per weight and number of rows.

Codes of the rows have one scale per row. With int8 weights their sums are exact; with int4 weights every 32 products
are summed up exactly, scaled, and added up in the order of the inputs. No row depends on the others.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import torch

from lade.backends.cpu.kernels import address_of, dtype_code, is_plain, kernel, refuse
from lade.backends.cpu.packing.integer_products import ZERO_POINT
from lade.backends.cpu.packing.panels import (
    BLOCK,
    DOT_PANEL,
    TILE_PANEL,
    TILE_ROWS,
    RowGroups,
    groups,
    parts_of_rows,
    row_groups,
)
from lade.backends.cpu.worker_threads import Stages

INT4_WIDE, INT4_NARROW = RowGroups((1, 2, 4, 6, 8, 12, 16), 16, 1), RowGroups((1, 2, 4), 4, 1)
"""Groups of rows of int4 products for 32 registers of 64 bytes, and for 16 of 32 bytes."""
_NEAR, _GROUP = 2**19, 2**17  # bytes of rows and of int4 weights that stay in a core's cache
_MANY_WEIGHTS = 2**15  # least bytes of int4 weights per part
_NEAR_TILES, _TILE_GROUP, _MANY_TILE_WEIGHTS = 2**20, 2**18, 2**16  # the same for tiles
_SHARES = 4  # parts per thread, so that a delayed thread does not hold up the others
_CODED = "float32, bfloat16 or float16"  # dtypes of rows that are rounded to codes
_STARTS = BLOCK // 8  # bytes of initial sums per block of a row, for int4 weights
PREPARED_ROWS = 128
"""Most rows whose calls are kept: a prompt's number of rows may never come again."""


def has_int4_kernel() -> bool:
    """Return True if the compiled library is there, which has an int4 kernel for every processor."""
    return kernel("multiply_int4").available


def initial_sums(values: torch.Tensor) -> torch.Tensor:
    """Return the initial sums of weights `[out, in]` for inputs with zero point 128, `[out padded]` int32."""
    sums = values.sum(-1, dtype=torch.int32).mul_(-ZERO_POINT)
    return torch.nn.functional.pad(sums, (0, -len(values) % DOT_PANEL))


class _Split(NamedTuple):
    """How rows pass through panels.

    Attributes:
        kernel: name of the kernel.
        together: rows interleaved in a group.
        padded: number of rows, with those that fill up the last group.
        row_group, panel_group: rows and panels per part of the work.
    """

    kernel: str
    together: int
    padded: int
    row_group: int
    panel_group: int


class Layout(NamedTuple):
    """Room for rows that are laid out in blocks, or rounded to codes, in bytes.

    Attributes:
        blocks: for the blocks; 0 for a row that lies as in blocks already.
        starts: for initial sums of int4 products, behind the blocks.
        scales: for the rows' scales, behind these.
    """

    blocks: int
    starts: int
    scales: int

    def addresses(self, room: int, rows: int) -> tuple[int, int, int]:
        """Return the addresses of blocks, initial sums (0 for none) and scales (0 for none) in a room.

        Args:
            room: address of as many bytes as there are in this layout.
            rows: address of the rows, which the blocks are if they need no room.
        """
        starts = room + self.blocks
        return room if self.blocks else rows, starts if self.starts else 0, starts + self.starts if self.scales else 0


class _Call(NamedTuple):
    """Prepared product of a number of rows.

    Attributes:
        stages: the kernels, with all fields but those that differ between calls.
        layout: room for the rows.
        rows, product: places of the fields of a `RowBlocks` and of a `PanelProduct`, see cpu.h.
    """

    stages: Stages
    layout: Layout
    rows: int
    product: int


class PanelWeight:
    """A weight in panels: bfloat16 in panels for dot products, int8, or int4.

    Args:
        panels: the weight, from `in_panels` or `in_int4_panels`.
        outputs: number of outputs, without padding.
        inputs: number of inputs, without padding.
        steps: `[out]` float32, scales of int8 weights; None for others.
        start: initial sums of int8 weights, from `initial_sums`; None for others.

    Raises:
        ValueError: there are fewer outputs in the panels.
    """

    def __init__(
        self,
        panels: torch.Tensor,
        outputs: int,
        inputs: int,
        *,
        steps: torch.Tensor | None = None,
        start: torch.Tensor | None = None,
    ) -> None:
        self.panels, self.outputs, self.inputs, self.steps, self.start = panels, outputs, inputs, steps, start
        self._of_codes, self._is_int4 = panels.dtype == torch.int8, panels.dim() == 4
        self._prepared: dict[tuple[int, int, str], _Call] = {}
        most = len(panels) * (DOT_PANEL if self._is_int4 else panels.shape[2] * DOT_PANEL)
        if outputs > most:
            raise ValueError(f"outputs is {outputs}: these panels have up to {most}")

    def product(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        instructions: str = "",
    ) -> torch.Tensor:
        """Multiply rows by the weight, and add a bias.

        Args:
            x: `[..., in]`: bfloat16 for bfloat16 weights; float32, bfloat16 or float16 for codes.
            bias: `[out]`, in any of these dtypes; None for none.
            dtype: dtype of the result, any of these; None for that of x.
            instructions: instructions of the kernel, see `kernel`.

        Returns:
            `[..., out]`.

        Raises:
            ValueError: an argument has another dtype, device or shape.
        """
        self.check(x, bias)
        x, bias = x.contiguous(), None if bias is None else bias.contiguous()
        out, kind = torch.empty(*x.shape[:-1], self.outputs, dtype=dtype or x.dtype), dtype_code(x.dtype)
        rows = x.numel() // self.inputs
        if rows:
            self._multiply(x, kind, rows, bias, out, instructions)
        return out

    def check(self, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Raise unless rows and bias can be multiplied; see `product`.

        Raises:
            ValueError: an argument has another dtype, device or shape.
        """
        half = torch.bfloat16
        fits = is_plain(x) and x.dim() and x.shape[-1] == self.inputs > 0 and (self._of_codes or x.dtype == half)
        own = bias is None or (is_plain(bias) and bias.shape == (self.outputs,))
        if not (fits and own and (bias is None or self._of_codes or bias.dtype == half)):
            takes = f"{_CODED if self._of_codes else half} on the CPU, [..., {self.inputs}] and [{self.outputs}]"
            refuse("the panel product", takes.replace("torch.", ""), x=x, panels=self.panels, bias=bias)

    def _multiply(
        self, x: torch.Tensor, kind: int, rows: int, bias: torch.Tensor | None, out: torch.Tensor, instructions: str
    ) -> None:
        key = rows, torch.get_num_threads(), instructions
        call = self._prepared.get(key)
        if call is None:
            stages = Stages()
            layout, row_place = self.add_rows(stages, rows, instructions)
            call = _Call(stages, layout, row_place, self.add_product(stages, rows, instructions))
            if rows <= PREPARED_ROWS:
                self._prepared[key] = call
        stages, layout, row_place, product_place = call
        room, fields = torch.empty(sum(layout), dtype=torch.int8), stages.fields[:]
        places = layout.addresses(room.data_ptr(), x.data_ptr())
        put_rows(fields, row_place, x.data_ptr(), kind, places)
        self.put_product(fields, product_place, places, bias, out.data_ptr(), dtype_code(out.dtype))
        stages.run(fields, (self, x, room, bias, out))

    def add_rows(self, stages: Stages, rows: int, instructions: str = "") -> tuple[Layout, int]:
        """Add the stage that lays rows out for a product, and return the room they take, and the stage's place."""
        split, blocks, width = self._split(rows, instructions), self.panels.shape[1], self.inputs * self.panels.itemsize
        lies_in_blocks = not self._of_codes and rows == 1 and width % BLOCK == 0  # as a lone row without padding does
        parts = 0 if lies_in_blocks else parts_of_rows(rows, rows * width)
        count = split.padded * blocks
        layout = Layout(
            0 if lies_in_blocks else count * BLOCK, count * _STARTS * self._is_int4, 4 * rows * self._of_codes
        )
        zero = ZERO_POINT if self.start is not None and split.kernel.endswith("codes") else 0
        fields = 0, 0, 0, 0, 0, rows, self.inputs, split.together, zero  # a RowBlocks
        return layout, stages.add(kernel("quantise_rows" if self._of_codes else "block_rows"), parts, fields)

    def add_product(self, stages: Stages, rows: int, instructions: str = "") -> int:
        """Add the stage that multiplies rows in blocks by this weight, and return its place."""
        split, (count, blocks, *_) = self._split(rows, instructions), self.panels.shape
        fields = (  # a PanelProduct
            *(0, 0, self.panels.data_ptr(), address_of(self.steps), address_of(self.start), 0, 0, 0, 0),
            *(rows, blocks, self.outputs, split.row_group, split.panel_group, split.together),
        )
        parts = -(-rows // split.row_group) * -(-count // split.panel_group)
        return stages.add(kernel(split.kernel, instructions), parts, fields)

    def put_product(
        self,
        fields: array[int],
        place: int,
        rows: tuple[int, int, int],
        bias: torch.Tensor | None,
        out: int,
        kind: int,
    ) -> None:
        """Complete the fields of a product.

        Args:
            fields: fields of all stages.
            place: place of this product, from `add_product`.
            rows: addresses of the rows' blocks, see `Layout.addresses`.
            bias: contiguous, `[out]`; None for none.
            out: address of the result.
            kind: dtype code of the result.
        """
        fields[place], starts, fields[place + 1] = rows
        if starts:
            fields[place + 4] = starts
        if bias is not None:
            fields[place + 5], fields[place + 7] = bias.data_ptr(), dtype_code(bias.dtype)
        fields[place + 6], fields[place + 8] = out, kind

    def _split(self, rows: int, instructions: str) -> _Split:
        count, blocks, tiles, *_ = self.panels.shape
        if self._is_int4:
            together = int4_row_groups(instructions).together_for(rows)
            size = blocks * self.panels[0, 0].numel()
            if rows <= 2 * together:
                shares = rows, max(-(-count // (_SHARES * torch.get_num_threads())), -(-_MANY_WEIGHTS // size))
            else:
                shares = max(together, _NEAR // (blocks * BLOCK) // together * together), max(1, _GROUP // size)
            return _Split("multiply_int4", together, -(-rows // together) * together, *shares)
        if tiles > 1:
            step = rows if rows <= TILE_ROWS else 2 * TILE_ROWS
            name = f"multiply_{'few' if rows <= TILE_ROWS else 'many'}_codes_by_tiles"
            return _Split(name, min(rows, TILE_ROWS), -(-rows // step) * step, *_tile_groups(rows, count, blocks))
        together = row_groups().together_for(rows)
        name = f"multiply_{'few' if rows <= row_groups().sizes[-1] else 'many'}{'_codes' * self._of_codes}"
        return _Split(name, together, -(-rows // together) * together, *groups(rows, count, blocks))


def put_rows(fields: array[int], place: int, x: int, kind: int, blocks: tuple[int, int, int]) -> None:
    """Complete the fields of rows that are to be laid out.

    Args:
        fields: fields of all stages.
        place: place of these rows, from `PanelWeight.add_rows`.
        x: address of the rows.
        kind: dtype code of the rows.
        blocks: addresses of the result, see `Layout.addresses`.
    """
    fields[place], fields[place + 4] = x, kind
    fields[place + 1], fields[place + 3], fields[place + 2] = blocks


def int4_row_groups(instructions: str = "") -> RowGroups:
    """Return the groups of rows of the int4 kernel for some instructions; empty for the best of this processor."""
    wide = instructions.startswith("avx512") if instructions else kernel("multiply_int4", "avx512").available
    return INT4_WIDE if wide else INT4_NARROW


def _tile_groups(rows: int, panels: int, blocks: int) -> tuple[int, int]:
    """Return the rows and panels per part of the work, for tiles."""
    size, threads = blocks * BLOCK * TILE_PANEL, torch.get_num_threads()
    if rows <= TILE_ROWS:
        return rows, max(-(-panels // (_SHARES * threads)), -(-_MANY_TILE_WEIGHTS // size))
    step = 2 * TILE_ROWS
    return max(step, _NEAR_TILES // (blocks * BLOCK) // step * step), max(1, _TILE_GROUP // size)
