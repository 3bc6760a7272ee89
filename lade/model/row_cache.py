"""What a batch whose rows come and go asks of a cache."""

from __future__ import annotations

from typing import Protocol

from lade.decoding.loop import KVCache
from lade.model.kv_cache import TreeCache
from lade.model.sizing import Sizing


class RowCache(KVCache, Protocol):
    """Keys and values of rows that join one by one, each prefilled by itself."""

    @property
    def sizing(self) -> Sizing:
        """How large its buffers are made."""
        ...

    @property
    def room(self) -> tuple[int, int]:
        """Rows, and slots of each, that there are buffers for; none while it is empty."""
        ...

    def reserve(self, rows: int, slots: int) -> None:
        """Have buffers of so many rows and slots, at least for what there is; see `Sizing` for what is asked for."""
        ...

    def take(self, part: TreeCache) -> None:
        """Append the only row of another cache of the same model; that one is empty then."""
        ...

    def reset(self) -> None:
        """Forget everything."""
        ...
