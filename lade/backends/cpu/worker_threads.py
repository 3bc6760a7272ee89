"""Worker threads for kernels: torch's own intra-op threads, or a pool beside them.

The hand-over to a thread of Python takes longer than many a product. Torch's threads, OpenMP's, wait for the next work
before they sleep, so whatever enters their pool finds them awake between two operators of torch. As with these, a
process that is forked off after such work hangs when it does more of it with several threads.
"""

from __future__ import annotations

import ctypes
import os
import struct
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from lade.compilation import TeamKernel


def in_team(kernel: TeamKernel, fields: Sequence[int], parts: int, holds: object = None) -> None:
    """Have threads share the parts of some work, each of which takes the next one that nobody has taken.

    The kernel gets the address of integers: the number of the next part, which threads count up from 0, the number of
    parts, and then the fields.

    Args:
        kernel: run by one or more threads; together they have to do all parts.
        fields: what to do.
        parts: at least one; no more threads than parts or than torch has take part.
        holds: what owns the memory that fields are addresses of.
    """
    work = array("q", (0, parts, *fields))
    (place, _), threads = work.buffer_info(), min(torch.get_num_threads(), parts)
    if threads == 1:
        kernel(place)
    elif (enter := _entrance()) is not None:
        enter(kernel.address, place, threads, 0)
    else:

        def run(part: int, parts: int, _alive: object = (work, holds)) -> None:
            kernel(place)

        in_parts(run, threads)


def bits(number: float) -> int:
    """A float32 number as a field, of which it is the first four bytes."""
    return int.from_bytes(struct.pack("<f", number), "little")


@cache
def _entrance() -> Any:
    """OpenMP's `GOMP_parallel(function, data, threads, flags)` as torch calls it; None where it has none.

    The linker looks among what is open to all before it looks among a library's own, and so does this.
    """
    for name in (None, torch._C.__file__):
        enter: Any = getattr(ctypes.CDLL(name), "GOMP_parallel", None)
        if enter is not None:
            enter.argtypes, enter.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
            return enter
    return None


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
