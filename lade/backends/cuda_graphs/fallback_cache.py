"""A static cache that falls back to a growing one when memory runs out.

This is the one place where running out of memory for captured passes is handled.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from lade.backends.cuda_graphs.static_cache import StaticCache
from lade.errors import CaptureWarning
from lade.model.kv_cache import TreeCache

logger = logging.getLogger(__name__)

T = TypeVar("T")


class FallbackCache:
    """Rows in a `StaticCache`; where memory runs out for its buffers, or for a capture, they move to a `TreeCache`.

    There they stay until `reset`, after one `CaptureWarning`. See `lade.model.kv_cache.RowCache`.

    Args:
        make_static: makes the empty cache that is used at first, and after each `reset`; None where captures fail.
        handed_out: gets the rows in the end, see `give_back`; None if they are not needed then.
    """

    def __init__(self, make_static: Callable[[], StaticCache | None], handed_out: TreeCache | None = None) -> None:
        self._make_static, self._handed_out = make_static, handed_out
        self._static: StaticCache | None = None
        self.dynamic: TreeCache | None = None
        """The cache that holds the rows where there is no static one, or none any more."""

    @property
    def current(self) -> StaticCache | TreeCache:
        """What holds the rows now."""
        if self._static is None and self.dynamic is None:
            self._static = self._make_static()
            if self._static is None:
                self.dynamic = TreeCache()
        current = self._static if self.dynamic is None else self.dynamic
        assert current is not None
        return current

    @property
    def lengths(self) -> list[int]:
        """`[B]`, cached tokens of each row; `[0]` while it is empty."""
        return self.current.lengths

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and slots of each, that there are buffers for; none while it is empty."""
        return self.current.room

    def buffer_rows(self, rows: int) -> int:
        """See `BufferSizes.buffer_rows`; as what holds the rows now."""
        return self.current.buffer_rows(rows)

    def buffer_slots(self, tokens: int, tree: int = 0) -> int:
        """See `BufferSizes.buffer_slots`; as what holds the rows now."""
        return self.current.buffer_slots(tokens, tree)

    def spare_tokens(self, tokens: int) -> int:
        """See `BufferSizes.spare_tokens`; as what holds the rows now."""
        return self.current.spare_tokens(tokens)

    def try_static(self, call: Callable[[StaticCache], T]) -> T | None:
        """Do something with the static cache that takes memory.

        Args:
            call: leaves the rows as they are where it raises.

        Returns:
            What it returns; None where `dynamic` holds the rows, since now or since before.

        Raises:
            torch.OutOfMemoryError: the rows did not even fit into a `TreeCache`. The cache is empty then.
        """
        _ = self.current
        if self._static is None:
            return None
        try:
            return call(self._static)
        except torch.OutOfMemoryError as problem:
            reason = (str(problem).splitlines() or [""])[0]
        self._move(self._static, reason)  # here, where the error and all that its frames held is freed
        return None

    def _move(self, static: StaticCache, reason: str) -> None:
        grown = TreeCache()
        static.move_to(grown)
        self._static, self.dynamic = None, grown
        logger.info("no memory for captured passes, these texts continue without: %s", reason)
        warnings.warn(
            f"there is no memory for passes that are captured, so these texts continue without, which is slower: "
            f"{reason} (allow fewer rows or tokens, or free the memory that other models keep: lade.release)",
            CaptureWarning,
            stacklevel=4,
        )

    def adopt(self, filled: TreeCache) -> None:
        """Take over all rows of another cache, being empty; the other one is not to be used any more."""
        places = [(0, row) for row in range(len(filled.lengths))]
        self.try_static(lambda static: static.join([filled], places))
        if self.dynamic is not None:
            self.dynamic = filled

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache; that one is empty then."""
        self.try_static(lambda static: static.take(part))
        if self.dynamic is not None:
            self.dynamic.take(part)

    def reserve(self, rows: int, slots: int) -> None:
        """Have buffers of this size, at least for what there is.

        Where static ones could not be had the dynamic cache reserves nothing: it has what the rows need.
        """
        _ = self.current
        if self.dynamic is not None:
            self.dynamic.reserve(rows, slots)
        else:
            self.try_static(lambda static: static.reserve(rows, slots))

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Of the `fed` tokens that came last, keep in each row those of its path and drop the others."""
        self.current.keep(paths, fed)

    def leave(self, row: int) -> None:
        """Evict a row; the last one takes its place and its number."""
        self.current.leave(row)

    def copy_row(self, row: int, tokens: int) -> TreeCache:
        """A cache of its own with the first tokens of a row."""
        return self.current.copy_row(row, tokens)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        self.current.batch_select_indices(indices)

    def give_back(self, tokens: int) -> None:
        """Release the buffers; unless `tokens`, those of the only row, are 0, `handed_out` gets the row before."""
        if self._handed_out is not None and tokens:
            self._hand_over(self._handed_out)
            self._handed_out.give_back(tokens)
        self.reset()

    def _hand_over(self, cache: TreeCache) -> None:
        """Give an empty cache all rows."""
        if self.room == (0, 0):
            return
        self.try_static(lambda static: static.copy_to(cache))
        if self.dynamic is not None:
            cache.reset()  # of what was copied before memory ran out
            cache.take(self.dynamic)

    def reset(self) -> None:
        """Forget everything, and release the buffers."""
        current, self._static, self.dynamic = self._static or self.dynamic, None, None
        if current is not None:
            current.reset()
