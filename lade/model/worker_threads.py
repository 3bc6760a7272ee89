"""Threads that compiled functions share their work among, kept from call to call."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def in_parts(run: Callable[[int, int], object], most: int) -> None:
    """Run a function for each part of some work, given its number and how many parts there are.

    Where this one is interrupted, the others go on: the function has to hold on to whatever memory it uses.

    Args:
        run: gives up the interpreter's lock, or nothing is gained.
        most: parts; no more than torch has threads are made, and at least one.
    """
    parts = max(1, min(torch.get_num_threads(), most))
    others = [_pool(parts - 1).submit(run, part, parts) for part in range(1, parts)]
    run(0, parts)
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "lade-worker")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has the pool, and none of its threads
