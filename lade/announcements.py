"""Short notes for whoever waits: what takes time once, and when threads compete for the cores."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Timer

_BUSY = 1.25
"""Runnable threads per core from which on a pass takes several times as long: its threads wait for each other."""


def announce(logger: logging.Logger, message: str, level: int = logging.INFO) -> None:
    """Log a message; in a terminal or notebook that does not show the log, print it to stderr as one line."""
    logger.log(level, "%s", message)
    if not logger.isEnabledFor(level) and is_interactive():
        print(f"lade: {message}", file=sys.stderr, flush=True)  # noqa: T201


@contextmanager
def announced_if_slow(logger: logging.Logger, message: str, after_s: float = 2.0) -> Iterator[None]:
    """Announce the work of a `with` block once it has taken some time; what is logged already is announced nowhere."""
    timer = Timer(after_s, lambda: None if logger.isEnabledFor(logging.INFO) else announce(logger, message))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_interactive() -> bool:
    """Return True if stderr is a terminal, or the output of a notebook's cell."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")


def contention(threads: int, cores: int, load: float) -> str:
    """Return a note if torch's threads compete for cores; empty if they do not.

    The load is the mean number of runnable threads on the machine in the last minute, those of this process included.
    """
    if threads < 2:
        return ""
    wanted = threads + max(0.0, load - threads)
    if wanted <= _BUSY * cores:
        return ""
    return (
        f"The machine is busy: {wanted:.0f} threads compete for {cores} cores, {threads} of them torch's, which wait "
        "for each other. torch.set_num_threads(1), or the environment variable OMP_NUM_THREADS=1, may be several "
        "times faster."
    )


def contention_now(threads: int) -> str:
    """Return `contention` of this process at this moment."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return contention(threads, cores, load)


@cache
def announce_once(logger: logging.Logger, message: str, level: int = logging.INFO) -> None:
    """Announce a message at most once per process."""
    announce(logger, message, level)
