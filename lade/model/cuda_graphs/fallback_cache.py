"""The cache of a `GraphRunner`: static as long as there is memory for it, and from then on one that grows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lade.errors import CaptureWarning
from lade.model.cuda_graphs.static_cache import StaticCache
from lade.model.kv_cache import TreeCache
from lade.model.sizing import Sizing

logger = logging.getLogger(__name__)

T = TypeVar("T")


class GraphCache:
    """Rows in a `StaticCache`; where memory runs out for its buffers, or for a capture, they move to a `TreeCache`.

    There they stay until `reset`, after one `CaptureWarning`. See `lade.model.row_cache.RowCache`.

    Args:
        begin: makes the empty cache that is used at first, and after each `reset`.
    """

    def __init__(self, begin: Callable[[], StaticCache | TreeCache]) -> None:
        self._begin = begin
        self._current: StaticCache | TreeCache | None = None

    @property
    def current(self) -> StaticCache | TreeCache:
        """What holds the rows now."""
        if self._current is None:
            self._current = self._begin()
        return self._current

    @property
    def lengths(self) -> list[int]:
        """`[B]`, cached tokens of each row; `[0]` while it is empty."""
        return self.current.lengths

    @property
    def sizing(self) -> Sizing:
        """How large buffers are made."""
        return self.current.sizing

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and slots of each, that there are buffers for; none while it is empty."""
        return self.current.room

    def attempt(self, call: Callable[[StaticCache], T]) -> T | None:
        """Ask something of the static cache that takes memory.

        Args:
            call: leaves the rows as they are where it raises.

        Returns:
            The answer, or None if there is none: then `current` is a `TreeCache`, now or already.

        Raises:
            torch.OutOfMemoryError: the rows did not even fit in that one. The cache is empty then.
        """
        static = self.current
        if not isinstance(static, StaticCache):
            return None
        try:
            return call(static)
        except torch.OutOfMemoryError as problem:
            reason = (str(problem).splitlines() or [""])[0]
        self._move(static, reason)  # here, where the problem and all that its frames held is gone
        return None

    def _move(self, static: StaticCache, reason: str) -> None:
        grown = TreeCache()
        static.move_to(grown)
        self._current = grown
        logger.info("no memory for captured passes, these texts go on without: %s", reason)
        warnings.warn(
            f"there is no memory for passes that are captured, so these texts go on without, which is slower: {reason} "
            "(allow fewer rows or tokens, or let go of what other models keep: lade.release)",
            CaptureWarning,
            stacklevel=4,
        )

    def adopt(self, filled: TreeCache) -> None:
        """Hold the rows of another cache, being empty; the other one is not to be used any more."""
        places = [(0, row) for row in range(len(filled.lengths))]
        self.attempt(lambda static: static.join([filled], places))
        if isinstance(self.current, TreeCache):
            self._current = filled

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache; that one is empty then."""
        self.attempt(lambda static: static.take(part))
        if isinstance(self.current, TreeCache):
            self.current.take(part)

    def reserve(self, rows: int, slots: int) -> None:
        """Have buffers of so many rows and slots, at least for what there is.

        Those that could not be had are not asked for again: what the rows have moved to has room by itself.
        """
        if isinstance(self.current, TreeCache):
            self.current.reserve(rows, slots)
        else:
            self.attempt(lambda static: static.reserve(rows, slots))

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Of the `fed` tokens that came last, keep in each row those of its path and drop the others."""
        self.current.keep(paths, fed)

    def leave(self, row: int) -> None:
        """Forget a row; the last one takes its place and its number."""
        self.current.leave(row)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        self.current.batch_select_indices(indices)

    def hand_over(self, heir: TreeCache) -> None:
        """Give an empty cache what this one holds."""
        if self.room == (0, 0):
            return
        self.attempt(lambda static: static.copy_to(heir))
        if isinstance(self.current, TreeCache):
            heir.reset()  # of what was copied before memory ran out
            heir.take(self.current)

    def reset(self) -> None:
        """Forget everything, and give buffers back."""
        if self._current is not None:
            self._current.reset()
            self._current = None
