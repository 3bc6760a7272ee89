"""Processes started by torchrun that share one model: the first leads, the others follow its passes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist

from lade.backends.processes.channel import connect
from lade.backends.processes.team import dismiss, team_of
from lade.cli.terminal import Terminal
from lade.hf.distributed import follow_until_dismissed
from lade.model.supports import supports


def connected(term: Terminal) -> int:
    """Join the processes of torchrun and return their number; 1 without torchrun.

    All but the first write nothing but errors from then on.
    """
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return 1
    connect()
    if dist.get_rank():
        term.mute()
    return dist.get_world_size()


def is_first() -> bool:
    """Return True in the process of rank 0."""
    return dist.get_rank() == 0


def begin_together(model: Any) -> None:
    """Make the collective calls that a split model needs in every process before its first generation."""
    team_of(model)
    supports(model)


@contextmanager
def leading(model: Any, processes: int) -> Iterator[bool]:
    """Yield True in the first process; the others follow its passes until its block ends, and then get False.

    The followers ignore SIGTERM and Ctrl-C, which torchrun sends to all: the first process may have work to finish.
    """
    if processes == 1:
        yield True
        return
    begin_together(model)
    if is_first():
        try:
            yield True
        finally:
            dismiss(model)
        return
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    follow_until_dismissed(model)
    yield False
