"""Locks that survive `os.fork`.

A forked child has only the thread that forked it. A lock held by another thread at that moment would stay locked
forever in the child, and deadlock any thread that needs it.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


class ForkSafeLock:
    """A reentrant lock that is free in a newly forked process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *problem: object) -> None:
        self.lock.release()

    def renew(self) -> None:
        """Reset to unlocked, in a forked child where the thread that held it does not exist."""
        self.lock = threading.RLock()


_locks: WeakSet[ForkSafeLock] = WeakSet()


def _renew_all() -> None:
    for lock in _locks:
        lock.renew()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_renew_all)
