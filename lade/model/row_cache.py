"""What a batch whose rows come and go needs of a cache."""

from __future__ import annotations

from typing import Protocol

from lade.decoding.loop import KVCache
from lade.model.kv_cache import TreeCache


class BufferSizes(Protocol):
    """How large a kind of cache makes its buffers for what is to lie in them."""

    def buffer_rows(self, rows: int) -> int:
        """Rows of buffers that hold `rows`."""
        ...

    def buffer_slots(self, tokens: int, tree: int = 0) -> int:
        """Slots of a row that has `tokens`, and after them those of a tree."""
        ...

    def spare_tokens(self, tokens: int) -> int:
        """Tokens to reserve beyond `tokens` that there are, so that buffers are seldom replaced."""
        ...


class RowCache(KVCache, BufferSizes, Protocol):
    """Keys and values of rows that join one by one, each prefilled by itself."""

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and slots of each, that there are buffers for; none while it is empty."""
        ...

    def reserve(self, rows: int, slots: int) -> None:
        """Have buffers of this size, at least for what there is; see `BufferSizes` for sizes that suit."""
        ...

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache of the same model; that one is empty then."""
        ...

    def copy_row(self, row: int, tokens: int) -> TreeCache:
        """A cache of its own with the first tokens of a row of text; there may be no layers with states."""
        ...

    def give_back(self, tokens: int) -> None:
        """End a generation: a user's cache holds the first `tokens` of the only row, other buffers are released."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...
