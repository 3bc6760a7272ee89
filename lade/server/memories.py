"""What requests leave behind for those that come after them, kept apart by who asked."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import replace

from lade.config import Lookahead, LookaheadConfig
from lade.memory import Memory

MOST_SCOPES, _BYTES = 16, 64 * 2**20
"""Memories kept at a time, and what each may take."""


class Memories:
    """A `lade.Memory` for each scope: whoever shares one writes similar texts faster, and could tell so by a clock.

    Args:
        lookahead: how the server drafts; a memory of its own is for all.
        share: "key": requests with one key, and one `cache_salt`, share; "all": all do; "none": nobody does.
    """

    def __init__(self, lookahead: Lookahead, share: str) -> None:
        config = LookaheadConfig() if lookahead == "auto" else lookahead
        self._default, self._share = config, share
        self._kept: OrderedDict[str, Memory] = OrderedDict()
        self._lock = threading.Lock()

    def scope(self, key: str, salt: str | None) -> str | None:
        """What a request shares with others; None for nothing. A salt narrows, and never widens."""
        if self._share == "none":
            return None
        return f"{'' if self._share == 'all' else key}\0{salt or ''}"

    def lookahead(self, asked: LookaheadConfig | str | None, scope: str | None) -> LookaheadConfig | None:
        """How a request is drafted: as it asks, or as the server does, with the memory of its scope.

        Args:
            asked: "auto" for what the server does; None for plain decoding.
            scope: of the request.
        """
        config = self._default if isinstance(asked, str) else asked
        if config is None or not config.adaptive or config.memory is not None:
            return config
        if self._default is not None and self._default.memory is not None:
            return replace(config, memory=self._default.memory)
        return config if scope is None else replace(config, memory=self._of(scope))

    def _of(self, scope: str) -> Memory:
        with self._lock:
            memory = self._kept.setdefault(scope, Memory(_BYTES))
            self._kept.move_to_end(scope)
            if len(self._kept) > MOST_SCOPES:
                del self._kept[self._least_missed()]
        return memory

    def _least_missed(self) -> str:
        """Of the key that has most of them, the salted one that was used least lately.

        Salts are whatever a client likes: with some of each memory's age alone, one client would have all others' go.
        """
        several = Counter(map(_key, self._kept))
        most = max(several.values())
        of_key = [scope for scope in self._kept if several[_key(scope)] == most]
        return next((scope for scope in of_key if most > 1 and not scope.endswith("\0")), of_key[0])


def _key(scope: str) -> str:
    return scope.partition("\0")[0]
