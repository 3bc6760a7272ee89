"""Run kernels on several threads: torch's intra-op pool, or a thread pool of Python.

Waking a Python thread takes longer than many products. Torch's OpenMP threads spin for a while before they sleep, so
work that enters their pool finds them awake between two operators of torch. OpenMP's pool does not survive a fork: in
a child of the process that imported this, the pool of Python is used instead.
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

from lade.backends.cpu import kernels
from lade.backends.cpu.kernels import CpuKernel


def run_on_team(kernel: CpuKernel, fields: Sequence[int], parts: int, holds: object = None) -> None:
    """Run a kernel on a team of threads, which take the parts of the work one by one.

    The kernel gets the address of int64 fields: the index of the next part (an atomic counter), the number of parts,
    and then `fields`.

    Args:
        kernel: loops until all parts are taken.
        fields: arguments of the kernel, as integers.
        parts: number of parts, at least one; no more threads are used than parts, or than torch has.
        holds: owner of the memory that `fields` point to, kept alive until the kernel returns.
    """
    _run(kernel, array("q", (0, parts, *fields)), min(torch.get_num_threads(), parts), holds)


class Stages:
    """Kernels that one team of threads runs one after the other: the work of several calls in one.

    Attributes:
        fields: fields of the kernel `run_stages`.
        threads: the most threads that find work.
    """

    def __init__(self) -> None:
        self.fields, self.threads = array("q", (0, 1, 0)), 1

    def add(self, kernel: CpuKernel, parts: int, fields: Sequence[int]) -> int:
        """Add a kernel, see `run_on_team`, and return the place of the first of its `fields` among all."""
        self.fields.extend((0, kernel.address, 2 + len(fields), 0, parts, *fields))
        self.fields[2] += 1
        self.threads = max(self.threads, min(torch.get_num_threads(), parts))
        return len(self.fields) - len(fields)

    def run(self, fields: array[int], holds: object) -> None:
        """Run the kernels on a copy of the fields, which is written to; see `run_on_team` for `holds`."""
        _run(kernels.kernel("run_stages"), fields, self.threads, holds)


def _run(kernel: CpuKernel, work: array[int], threads: int, holds: object) -> None:
    place, _ = work.buffer_info()
    if threads == 1:
        kernel(place)
    elif (enter := _entrance()) is not None:
        enter(kernel.address, place, threads, 0)
    else:

        def run(part: int, parts: int, _alive: object = (work, holds)) -> None:
            kernel(place)

        run_in_parts(run, threads)


def float_bits(number: float) -> int:
    """Return the bits of a float32 number as an integer field."""
    return int.from_bytes(struct.pack("<f", number), "little")


_OWNER = os.getpid()


def _entrance() -> Any:
    """Return the entrance of torch's pool of threads, see `_openmp_entrance`; None in a forked child."""
    return _openmp_entrance() if os.getpid() == _OWNER else None


@cache
def _openmp_entrance() -> Any:
    """Return OpenMP's `GOMP_parallel(function, data, threads, flags)` of the runtime that torch uses; None without one.

    Global symbols are searched before those of torch's own library, as the dynamic linker does.
    """
    for name in (None, torch._C.__file__):
        enter: Any = getattr(ctypes.CDLL(name), "GOMP_parallel", None)
        if enter is not None:
            enter.argtypes, enter.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
            return enter
    return None


def run_in_parts(run: Callable[[int, int], object], most: int) -> None:
    """Call a function once for each part of some work, with the index of the part and the number of parts.

    If this thread is interrupted, the others go on: the function must keep the memory that it uses alive.

    Args:
        run: function that releases the GIL; otherwise threads gain nothing.
        most: upper bound of the number of parts; there is at least one, and no more than torch has threads.
    """
    parts = max(1, min(torch.get_num_threads(), most))
    others = [_pool(parts - 1).submit(run, part, parts) for part in range(1, parts)]
    run(0, parts)
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "lade-worker")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child inherits the pool without its threads
