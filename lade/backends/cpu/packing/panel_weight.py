"""Weights in panels and their products with rows, which are laid out in blocks, or rounded to int8, in the same call.

A product of a few rows with a small weight takes some 10 us, as long as a few calls of Python. So what calls have in
common, such as how their work is split, is prepared once per weight and number of rows.

Rows are rounded to codes with a scale for every 32 inputs. Products of as many codes are summed up exactly, scaled, and
added up in the order of the inputs. No row depends on the others.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from lade.backends.cpu.kernels import address_of, dtype_code, is_plain, kernel, refuse
from lade.backends.cpu.packing.panels import BLOCK, DOT_GROUPS, DOT_PANEL, RowGroups, groups, parts_of_rows
from lade.backends.cpu.worker_threads import At, Room, Stages

WIDE_BLOCKS, NARROW_BLOCKS = RowGroups((1, 2, 4, 6, 8, 12, 16), 16, 1), RowGroups((1, 2, 4), 4, 1)
"""Groups of rows of products of codes for 32 registers of 64 bytes, and for 16 of 32 bytes."""
_NEAR, _GROUP = 2**19, 2**17  # bytes of rows and of codes that stay in a core's cache
_MANY_WEIGHTS = 2**15  # least bytes of codes per part
_SHARES = 4  # parts per thread, so that a delayed thread does not hold up the others
_CODED = "float32, bfloat16 or float16"  # dtypes of rows that are rounded to codes
_FACTS = 32  # bytes of the numbers that are noted of each block of a row in codes
PREPARED_ROWS = 128
"""Most rows whose calls are kept: a prompt's number of rows may never come again."""


def has_block_kernels() -> bool:
    """Return True if the compiled library is there, which has kernels of codes for every processor."""
    return kernel("multiply_int8").available


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
    """Where rows lie in blocks, and what is noted of their codes; 0 for none."""

    rows: At
    facts: At | int


class PanelWeight:
    """A weight in panels: bfloat16 in panels for dot products, or codes.

    Args:
        panels: the weight, from `in_panels` or `in_block_panels`.
        outputs: number of outputs, without padding.
        inputs: number of inputs, without padding.
        codes: format of the codes, see `BlockCodes.name`; empty for bfloat16.

    Raises:
        ValueError: there are fewer outputs in the panels.
    """

    def __init__(self, panels: torch.Tensor, outputs: int, inputs: int, *, codes: str = "") -> None:
        self.panels, self.outputs, self.inputs, self.codes = panels, outputs, inputs, codes
        self._prepared: dict[Hashable, tuple[Stages, int]] = {}
        most = len(panels) * DOT_PANEL * (1 if codes else panels.shape[2])
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
        out = torch.empty(*x.shape[:-1], self.outputs, dtype=dtype or x.dtype, device="cpu")
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
        fits = is_plain(x) and x.dim() and x.shape[-1] == self.inputs > 0 and (self.codes or x.dtype == half)
        own = bias is None or (is_plain(bias) and bias.shape == (self.outputs,))
        if not (fits and own and (bias is None or self.codes or bias.dtype == half)):
            takes = f"{_CODED if self.codes else half} on the CPU, [..., {self.inputs}] and [{self.outputs}]"
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
        memory = torch.empty(size, dtype=torch.int8, device="cpu")
        stages.run((memory.data_ptr(), x.data_ptr(), out.data_ptr(), *self.addresses(bias)))

    def addresses(self, bias: torch.Tensor | None) -> tuple[int, int]:
        """Return the addresses of the weight and of a bias, as `add_product` counts them.

        They are looked up in each call: tensors move when they are sent to another process.
        """
        return self.panels.data_ptr(), address_of(bias)

    def add_rows(self, stages: Stages, room: Room, rows: int, x: At, kind: int, instructions: str = "") -> Blocks:
        """Add the stage that lays rows at a place out for a product, and return where in the room they then lie."""
        split = self._split(rows, instructions)
        width = self.inputs * (1 if self.codes else self.panels.itemsize)
        if not self.codes and rows == 1 and width % BLOCK == 0:  # such a row lies as in blocks
            return Blocks(x, 0)
        count = split.padded * self.panels.shape[1]
        to, facts = room.take(count * BLOCK), room.take(count * _FACTS) if self.codes else 0
        fields = x, to, facts, kind, rows, self.inputs, split.together  # a RowBlocks, see cpu.h
        stages.add(kernel("quantise_rows" if self.codes else "block_rows"), parts_of_rows(rows, rows * width), fields)
        return Blocks(to, facts)

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
        *,
        joined: bool = False,
    ) -> None:
        """Add the stage that multiplies rows by this weight; `own` is the index of the first of its `addresses`.

        The rows may be laid out for another weight of the same kind and number of inputs. If that was multiplied in the
        stage before, this one may be `joined` to it.
        """
        split, (count, wide, *_) = self._split(rows, instructions), self.panels.shape
        fields = (  # a PanelProduct, see cpu.h
            *(blocks.rows, blocks.facts, At(own), At(own + 1), out, bias_kind, kind),
            *(rows, wide, self.outputs, split.row_group, split.panel_group, split.together),
        )
        parts = -(-rows // split.row_group) * -(-count // split.panel_group)
        stages.add(kernel(split.kernel, instructions), parts, fields, joined=joined)

    def _split(self, rows: int, instructions: str) -> _Split:
        count, blocks, *_ = self.panels.shape
        if self.codes:
            together = block_row_groups(instructions).together_for(rows)
            size = blocks * self.panels[0, 0].numel()
            if rows <= 2 * together:
                shares = rows, max(-(-count // (_SHARES * torch.get_num_threads())), -(-_MANY_WEIGHTS // size))
            else:
                shares = max(together, _NEAR // (blocks * BLOCK) // together * together), max(1, _GROUP // size)
            return _Split(f"multiply_{self.codes}", together, -(-rows // together) * together, *shares)
        together = DOT_GROUPS.together_for(rows)
        name = f"multiply_{'few' if rows <= DOT_GROUPS.sizes[-1] else 'many'}"
        return _Split(name, together, -(-rows // together) * together, *groups(rows, count, blocks))


def block_row_groups(instructions: str = "") -> RowGroups:
    """Return the groups of rows of the kernels of codes for some instructions; empty for the best of this processor."""
    wide = instructions.startswith("avx512") if instructions else kernel("multiply_int8", "avx512").available
    return WIDE_BLOCKS if wide else NARROW_BLOCKS
