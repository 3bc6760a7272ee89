"""Draft memories of tenants: what is shared, with whom, and which one is evicted."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace

from lade.config import Lookahead, LookaheadConfig
from lade.memory import Memory

MAX_SCOPES, _BYTES = 16, 64 * 2**20
"""Maximum number of memories, and size of each in bytes."""


class TenantMemories:
    """Per-tenant draft memories, LRU: sharing one speeds up similar texts, which timing could reveal.

    Args:
        lookahead: the server's default method. A memory of its own, which is one file, serves requests without a salt
            if `share` is "all", or "key" and there are no two keys.
        share: "key": shared per key and `cache_salt`; "all": shared by all; "none": not shared.
        several_keys: function that tells whether requests of several keys are served now.
    """

    def __init__(self, lookahead: Lookahead, share: str, several_keys: Callable[[], bool] = lambda: False) -> None:
        config = LookaheadConfig() if lookahead == "auto" else lookahead
        self._file = None if config is None else config.memory
        self._default = config if config is None else replace(config, memory=None)
        self._share, self._several_keys = share, several_keys
        self._kept: OrderedDict[str, Memory] = OrderedDict()
        self._lock = threading.Lock()

    def scope(self, key: str, salt: str | None) -> str | None:
        """Return the tenant scope of a request; None for none. A salt only narrows it."""
        if self._share == "none":
            return None
        return f"{'' if self._share == 'all' else key}\0{salt or ''}"

    def lookahead(self, requested: LookaheadConfig | str | None, scope: str | None) -> LookaheadConfig | None:
        """Return the method of a request, with the memory of its scope.

        Args:
            requested: the request's method; a text for the server's default, None for plain decoding.
            scope: tenant scope of the request.
        """
        config = self._default if isinstance(requested, str) else requested
        if config is None or not config.adaptive or config.memory is not None or scope is None:
            return config
        of_all = self._file if self.serves_file and scope.endswith("\0") else None
        return replace(config, memory=self._of(scope) if of_all is None else of_all)

    @property
    def serves_file(self) -> bool:
        """True unless the memory of the server's default method would be shared by keys that share nothing."""
        return self._share == "all" or (self._share == "key" and not self._several_keys())

    def _of(self, scope: str) -> Memory:
        with self._lock:
            memory = self._kept.setdefault(scope, Memory(_BYTES))
            self._kept.move_to_end(scope)
            if len(self._kept) > MAX_SCOPES:
                del self._kept[self._evicted()]
        return memory

    def _evicted(self) -> str:
        """Return the memory to evict: of the key with most memories, the least recently used salted one.

        Clients choose salts freely; by age alone one client could evict all others' memories.
        """
        several = Counter(map(_key, self._kept))
        most = max(several.values())
        of_key = [scope for scope in self._kept if several[_key(scope)] == most]
        return next((scope for scope in of_key if most > 1 and not scope.endswith("\0")), of_key[0])


def _key(scope: str) -> str:
    return scope.partition("\0")[0]
