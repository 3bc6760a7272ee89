"""How far positions lie from the number of tokens cached before them.

An image takes fewer positions than tokens in models that count time, height and width (Qwen's and their kin): after it
the text goes on with positions that are a constant away from the slots, on each axis and in each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
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

    @property
    def axes(self) -> int:
        """Numbers that make a position; 0 where it is the slot's."""
        return max(map(len, self.rows), default=0)

    def array(self) -> npt.NDArray[np.int64]:
        """`[axes, B, 1]`; zeros for rows of text alone."""
        rows = [row or (0,) * self.axes for row in self.rows]
        return np.array(rows, dtype=np.int64).T[..., None]

    def on(self, device: torch.device) -> torch.Tensor | None:
        """`[axes, B, 1]` int64, uploaded once; None where no row has any."""
        if self.rows and device not in self._uploaded:
            self._uploaded[device] = torch.from_numpy(self.array().copy()).to(device)
        return self._uploaded.get(device)
