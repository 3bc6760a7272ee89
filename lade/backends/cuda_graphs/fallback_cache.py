"""A static cache that falls back to a growing one when memory runs out.

This is the only place that handles running out of memory for captured passes.
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
    """Rows in a `StaticCache`, moved to a `TreeCache` when memory runs out for buffers or for a capture.

    They stay there until `reset`, after one `CaptureWarning`. See `lade.model.kv_cache.RowCache`.

    An empty static cache is made at first and after each `reset`, or none where captures fail. A user's cache to be
    `handed_out` gets the rows in `give_back`.
    """

    def __init__(self, make_static: Callable[[], StaticCache | None], handed_out: TreeCache | None = None) -> None:
        self._make_static, self._handed_out = make_static, handed_out
        self._current: StaticCache | TreeCache | None = None

    @property
    def current(self) -> StaticCache | TreeCache:
        """The cache that holds the rows."""
        if self._current is None:
            static = self._make_static()
            self._current = TreeCache() if static is None else static
        return self._current

    @property
    def dynamic(self) -> TreeCache | None:
        """The cache that holds the rows if it is no static one; None otherwise."""
        current = self.current
        return current if isinstance(current, TreeCache) else None

    @property
    def lengths(self) -> list[int]:
        """`[B]`, cached tokens of each row; `[0]` while it is empty."""
        return self.current.lengths

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and slots per row, of the present buffers; zeros while it is empty."""
        return self.current.room

    def buffer_rows(self, rows: int) -> int:
        """See `BufferSizes.buffer_rows`; that of the current cache."""
        return self.current.buffer_rows(rows)

    def buffer_slots(self, tokens: int, tree: int = 0) -> int:
        """See `BufferSizes.buffer_slots`; that of the current cache."""
        return self.current.buffer_slots(tokens, tree)

    def spare_tokens(self, tokens: int) -> int:
        """See `BufferSizes.spare_tokens`; that of the current cache."""
        return self.current.spare_tokens(tokens)

    def try_static(self, call: Callable[[StaticCache], T]) -> T | None:
        """Return the result of a call that may allocate memory; None if `dynamic` holds the rows, from before or now.

        The call must leave the rows unchanged if it raises.

        Raises:
            torch.OutOfMemoryError: the rows do not even fit into a `TreeCache`. The cache is then empty.
        """
        static = self.current
        if isinstance(static, TreeCache):
            return None
        try:
            return call(static)
        except torch.OutOfMemoryError as problem:
            reason = (str(problem).splitlines() or [""])[0]
        self._move(static, reason)  # outside `except`, so that tensors in the error's frames are freed
        return None

    def _move(self, static: StaticCache, reason: str) -> None:
        grown = TreeCache()
        static.move_to(grown)
        self._current = grown
        logger.info("no memory for captured passes, these texts continue without: %s", reason)
        warnings.warn(
            f"there is no memory for captured passes, so these texts continue without, which is slower: "
            f"{reason} (allow fewer rows or tokens, or free the memory of other models with lade.release)",
            CaptureWarning,
            stacklevel=4,
        )

    def adopt(self, filled: TreeCache) -> None:
        """Take over all rows of another cache into this empty one; the other must not be used afterwards."""
        places = [(0, row) for row in range(len(filled.lengths))]
        self.try_static(lambda static: static.join([filled], places))
        if self.dynamic is not None:
            self._current = filled

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache, which is empty afterwards."""
        self.try_static(lambda static: static.take(part))
        if self.dynamic is not None:
            self.dynamic.take(part)

    def reserve(self, rows: int, slots: int) -> None:
        """Resize the buffers to this size, or to what the rows need if that is more.

        After a fallback nothing is reserved: the dynamic cache grows with its rows.
        """
        if self.dynamic is not None:
            self.dynamic.reserve(rows, slots)
        else:
            self.try_static(lambda static: static.reserve(rows, slots))

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Keep, of the last `fed` tokens, those on each row's path, and drop the others."""
        self.current.keep(paths, fed)

    def leave(self, row: int) -> None:
        """Evict a row; the last row takes its index."""
        self.current.leave(row)

    def copy_row(self, row: int, tokens: int) -> TreeCache:
        """Return a new cache with the first tokens of a row."""
        return self.current.copy_row(row, tokens)

    def give_back(self, tokens: int) -> None:
        """Release the buffers, after handing `tokens` of the only row to `handed_out`; 0 hands over nothing."""
        cache = self._handed_out
        if cache is not None and tokens:
            if self.room != (0, 0):
                self.try_static(lambda static: static.copy_to(cache))
                if self.dynamic is not None:
                    cache.reset()  # drops rows copied before memory ran out
                    cache.take(self.dynamic)
            cache.give_back(tokens)
        self.reset()

    def reset(self) -> None:
        """Drop all rows, and release the buffers."""
        current, self._current = self._current, None
        if current is not None:
            current.reset()
