"""Where static caches have their buffers from."""

from __future__ import annotations

from typing import Protocol

from lade.model.cuda_graphs.buffers import Buffers, Layers


class Lender(Protocol):
    """Lends buffers to caches."""

    def lend(self, borrower: object, layers: Layers, rows: int, slots: int, limit: int | None) -> Buffers:
        """Buffers of at least so many rows and slots, all zero.

        Args:
            borrower: has them until they are given back, or it is gone itself.
            layers: keys and values of each.
            rows: at least.
            slots: of each row, at least.
            limit: slots in all that larger ones may have, which are there already; None for any number.

        Raises:
            torch.OutOfMemoryError: there is no memory for them.
        """
        ...

    def take_back(self, buffers: Buffers) -> None:
        """They are not needed any more, and may be lent again."""
        ...

    def drop(self, buffers: Buffers) -> None:
        """They are not needed any more; their memory is."""
        ...


class OwnBuffers:
    """Makes new buffers each time, which go with the cache."""

    def lend(self, borrower: object, layers: Layers, rows: int, slots: int, limit: int | None) -> Buffers:
        """See `Lender.lend`."""
        return Buffers(layers, rows, slots)

    def take_back(self, buffers: Buffers) -> None:
        """Nothing: nobody else would want them."""

    def drop(self, buffers: Buffers) -> None:
        """Nothing: they go when the cache forgets them."""
