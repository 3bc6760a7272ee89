"""Locks that survive `os.fork`.

A forked process has the thread that forked it, and no other. A lock that another one held at that moment would stay
locked for good, and every thread that needs it would wait forever.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class ForkSafeLock:
    """A reentrant lock, which is free in a process that was just forked."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *problem: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Be free, even if another thread held it: no other thread is there."""
        self._lock = threading.RLock()


_locks: WeakSet[ForkSafeLock] = WeakSet()


def _renew_all() -> None:
    for lock in _locks:
        lock.renew()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_renew_all)
