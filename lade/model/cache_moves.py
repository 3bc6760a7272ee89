"""Moves of accepted tokens within the rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lade.model.host_to_device import upload

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of so many bytes that numpy has, too, which knows no bfloat16: what is moved is not looked at."""


class Whole(NamedTuple):
    """Buffers of several layers in one piece.

    Attributes:
        tensor: `[N, rows, H, capacity, D]`.
        array: the same memory, where it is the host's; else None. There operations of torch take several times as long
            as those of numpy.
    """

    tensor: torch.Tensor
    array: npt.NDArray[Any] | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Whole:
        """With the array that belongs to it."""
        if not tensor.is_cpu:
            return cls(tensor, None)
        return cls(tensor, tensor.detach().view(_BITS[tensor.element_size()]).numpy())


class Move(NamedTuple):
    """Tokens of one row that are to follow each other, the same in all layers.

    Attributes:
        row: of the batch.
        sources: `[M]`, slots where the tokens lie, ascending.
        target: the slot where the first one belongs, never after where it lies.
    """

    row: int
    sources: Sequence[int]
    target: int

    @property
    def targets(self) -> range:
        """`[M]`, slots where the tokens belong."""
        return range(self.target, self.target + len(self.sources))

    @property
    def is_one_piece(self) -> bool:
        """Whether the tokens lie side by side."""
        return self.sources[-1] - self.sources[0] == len(self.sources) - 1

    def make_here(self, array: npt.NDArray[Any]) -> None:
        """Make it in `[N, rows, H, capacity, D]`; numpy takes care of pieces that overlap where they belong."""
        own, count, first = array[:, self.row], len(self.sources), self.sources[0]
        moved = own[:, :, first : first + count] if self.is_one_piece else own[:, :, self.sources]
        own[:, :, self.target : self.target + count] = moved

    def make_remotely(self, whole: torch.Tensor, sources: torch.Tensor | None) -> None:
        """Make it in `[N, rows, H, capacity, D]`, given the slots there; None for a piece that does not overlap."""
        row, count = whole.select(1, self.row), len(self.sources)
        moved = row.narrow(2, self.sources[0], count) if sources is None else row.index_select(2, sources)
        row.narrow(2, self.target, count).copy_(moved)


def make_all(moves: Sequence[Move], wholes: Sequence[Whole]) -> None:
    """Make moves, in each row one at most; slots are uploaded once to each device, and only if they have to be."""
    move, lone = moves[0], len(moves) == 1
    needs_no_slots = lone and move.is_one_piece and move.sources[0] > move.targets[-1]
    uploaded: dict[torch.device, list[torch.Tensor]] = {}
    for whole, array in wholes:
        if array is not None:
            for each in moves:
                each.make_here(array)
        elif needs_no_slots:
            move.make_remotely(whole, None)
        else:
            if whole.device not in uploaded:
                uploaded[whole.device] = upload([np.array(column) for column in _columns(moves)], whole.device)
            sources, rows, targets = uploaded[whole.device]
            if lone:  # as a slice, which is faster
                move.make_remotely(whole, sources)
            else:
                whole[:, rows, :, targets] = whole[:, rows, :, sources]


def _columns(moves: Sequence[Move]) -> list[list[int]]:
    """`[M]` each: slots where tokens lie, their rows, and slots where they belong."""
    return [
        [slot for move in moves for slot in move.sources],
        [move.row for move in moves for _ in move.sources],
        [slot for move in moves for slot in move.targets],
    ]
