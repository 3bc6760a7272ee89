"""Moves of accepted tokens within the rows of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lade.model.host_to_device import upload


@dataclass
class Moves:
    """Tokens to be moved within their rows, the same in all layers; token i of M from one slot to another.

    Attributes:
        rows: `[M]`, of the batch.
        sources: `[M]`, slots where the tokens lie.
        targets: `[M]`, slots where they belong, never after where they lie.
    """

    rows: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def add(self, row: int, sources: Sequence[int], target: int) -> None:
        """Move tokens of a row to where one slot follows the other, beginning with `target`."""
        self.rows += [row] * len(sources)
        self.sources += sources
        self.targets += range(target, target + len(sources))

    def make(self, wholes: Sequence[torch.Tensor]) -> None:
        """Make them in tensors `[N, rows, H, capacity, D]`; the slots are uploaded once to each device."""
        one_row = self.rows[0] == self.rows[-1]  # they come row by row
        if one_row and self._is_one_piece():
            for whole in wholes:
                row = whole.select(1, self.rows[0])
                row.narrow(2, self.targets[0], len(self.rows)).copy_(row.narrow(2, self.sources[0], len(self.rows)))
            return
        columns = [self.sources] if one_row else [self.sources, self.rows, self.targets]
        uploaded: dict[torch.device, list[torch.Tensor]] = {}
        for whole in wholes:
            if whole.device not in uploaded:
                uploaded[whole.device] = upload([np.array(column) for column in columns], whole.device)
            sources, *rest = uploaded[whole.device]
            if one_row:  # as a slice, which is faster
                row = whole.select(1, self.rows[0])
                row.narrow(2, self.targets[0], len(self.rows)).copy_(row.index_select(2, sources))
            else:
                rows, targets = rest
                whole[:, rows, :, targets] = whole[:, rows, :, sources]

    def _is_one_piece(self) -> bool:
        """Whether tokens of one row lie side by side, and not where any of them belongs."""
        first, last = self.sources[0], self.sources[-1]
        return last - first == len(self.sources) - 1 and first > self.targets[-1]
