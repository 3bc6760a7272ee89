"""Weights in panels and their products with rows, which are laid out in blocks, or rounded to int8, in the same call.

A product of a few rows with a small weight takes some 10 us, as long as a few calls of Python. So what calls have in
common, such as how their work is split, is prepared once per weight and number of rows.

Codes of the rows have one scale per row. With int8 weights their sums are exact; with int4 weights every 32 products
are summed up exactly, scaled, and added up in the order of the inputs. No row depends on the others.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from lade.backends.cpu.kernels import address_of, dtype_code, is_plain, kernel, refuse
from lade.backends.cpu.packing.panels import (
    BLOCK,
    DOT_PANEL,
    TILE_PANEL,
    TILE_ROWS,
    ZERO_POINT,
    RowGroups,
    groups,
    parts_of_rows,
    row_groups,
)
from lade.backends.cpu.worker_threads import At, Room, Stages

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


class Blocks(NamedTuple):
    """Where rows lie in blocks, with initial sums of int4 products and scales of codes; 0 for none."""

    rows: At
    starts: At | int
    scales: At | int


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
        self._prepared: dict[Hashable, tuple[Stages, int]] = {}
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
        out = torch.empty(*x.shape[:-1], self.outputs, dtype=dtype or x.dtype)
        rows = x.numel() // self.inputs
        kinds = dtype_code(x.dtype), dtype_code(out.dtype), 0 if bias is None else dtype_code(bias.dtype)
        if rows:
            self._multiply(x, rows, kinds, bias, out, instructions)
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
        self,
        x: torch.Tensor,
        rows: int,
        kinds: tuple[int, int, int],
        bias: torch.Tensor | None,
        out: torch.Tensor,
        instructions: str,
    ) -> None:
        """Compute `product` of tensors that are contiguous; `kinds` are the dtype codes of x, out and bias."""
        key = rows, torch.get_num_threads(), kinds, instructions
        stages, size = self._prepared.get(key) or (None, 0)
        if stages is None:
            stages, room = Stages(), Room(0)
            blocks = self.add_rows(stages, room, rows, At(1), kinds[0], instructions)
            self.add_product(stages, rows, blocks, 3, At(2), *kinds[1:], instructions)
            size = room.size
            if rows <= PREPARED_ROWS:
                self._prepared[key] = stages, size
        memory = torch.empty(size, dtype=torch.int8)
        stages.run((memory.data_ptr(), x.data_ptr(), out.data_ptr(), *self.addresses(bias)))

    def addresses(self, bias: torch.Tensor | None) -> tuple[int, int, int, int]:
        """Return the addresses of the weight and of a bias, as `add_product` counts them.

        They are looked up in each call: tensors move when they are sent to another process.
        """
        return self.panels.data_ptr(), address_of(self.steps), address_of(self.start), address_of(bias)

    def add_rows(self, stages: Stages, room: Room, rows: int, x: At, kind: int, instructions: str = "") -> Blocks:
        """Add the stage that lays rows at a place out for a product, and return where in the room they then lie."""
        split, width = self._split(rows, instructions), self.inputs * self.panels.itemsize
        if not self._of_codes and rows == 1 and width % BLOCK == 0:  # such a row lies as in blocks
            return Blocks(x, 0, 0)
        count = split.padded * self.panels.shape[1]
        to = room.take(count * BLOCK)
        starts = room.take(count * _STARTS) if self._is_int4 else 0
        scales = room.take(4 * rows) if self._of_codes else 0
        zero = ZERO_POINT if self.start is not None and split.kernel.endswith("codes") else 0
        fields = x, to, scales, starts, kind, rows, self.inputs, split.together, zero  # a RowBlocks, see cpu.h
        stages.add(
            kernel("quantise_rows" if self._of_codes else "block_rows"), parts_of_rows(rows, rows * width), fields
        )
        return Blocks(to, starts, scales)

    def add_product(
        self,
        stages: Stages,
        rows: int,
        blocks: Blocks,
        own: int,
        out: At,
        kind: int,
        bias_kind: int,
        instructions: str = "",
    ) -> None:
        """Add the stage that multiplies rows by this weight; `own` is the index of the first of its `addresses`.

        The rows may be laid out for another weight of the same kind and number of inputs.
        """
        split, (count, wide, *_) = self._split(rows, instructions), self.panels.shape
        panels, steps, start, bias = map(At, range(own, own + 4))
        fields = (  # a PanelProduct, see cpu.h
            *(blocks.rows, blocks.scales, panels, steps, blocks.starts or start, bias, out, bias_kind, kind),
            *(rows, wide, self.outputs, split.row_group, split.panel_group, split.together),
        )
        parts = -(-rows // split.row_group) * -(-count // split.panel_group)
        stages.add(kernel(split.kernel, instructions), parts, fields)

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
