"""How far positions lie from the number of tokens cached before them.

An image takes fewer positions than tokens in models that count time, height and width (Qwen's and their kin): after it
the text goes on with positions that are a constant away from the slots, on each axis and in each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Axes = tuple[int, ...]
"""What to add to a position, one number an axis; empty where a position is one number, the slot's."""


@dataclass(frozen=True)
class PositionOffsets:
    """The offsets of the rows of a cache.

    Attributes:
        rows: `[B]`, of each row; empty where no row has any.
    """

    rows: tuple[Axes, ...] = ()
    _uploaded: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    def __bool__(self) -> bool:
        return bool(self.rows)

    @classmethod
    def collected(cls, places: Sequence[tuple[PositionOffsets, int]]) -> PositionOffsets:
        """Those of rows that others have: of each the offsets it is among, and its number there."""
        rows = tuple(offsets.rows[row] if offsets else () for offsets, row in places)
        return cls(rows) if any(rows) else cls()

    def selected(self, rows: Sequence[int]) -> PositionOffsets:
        """Those of these rows, in this order."""
        return self.collected([(self, row) for row in rows])

    def added_to(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions `[B, S]` with the offsets of their rows, `[axes, B, S]`; as they are where there are none."""
        if not self.rows:
            return positions
        device = positions.device
        if device not in self._uploaded:
            axes = max(map(len, self.rows))
            rows = [row or (0,) * axes for row in self.rows]  # a row of text alone
            self._uploaded[device] = torch.tensor(rows, device=device).T[..., None].contiguous()  # [axes, B, 1]
        return positions + self._uploaded[device]
