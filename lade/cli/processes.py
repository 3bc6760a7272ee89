"""Processes that torchrun has started with one command line: the first one is the shell, the others help it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist

from lade.backends.processes.channel import connect
from lade.backends.processes.team import dismiss, team_of
from lade.cli.batch.crew import Crew
from lade.cli.terminal import Terminal
from lade.errors import ConfigError
from lade.hf.shared import follow_to_the_end
from lade.model.support.supports import supports


def connected(term: Terminal) -> int:
    """How many processes torchrun has started; all but the first write errors alone from now on. 1 without torchrun."""
    if not dist.is_available() or not dist.is_torchelastic_launched():
        return 1
    connect()
    if dist.get_rank():
        term.mute()
    return dist.get_world_size()


def is_first() -> bool:
    """Whether this is the first of several processes."""
    return dist.get_rank() == 0


def crew_of(term: Terminal) -> Crew:
    """The processes that share the prompts of this run, each on a device of its own where there are several.

    Raises:
        ConfigError: torchrun has not started several.
    """
    if connected(term) == 1:
        raise ConfigError("replicas", True, "it takes processes: torchrun --nproc-per-node 2 -m lade generate ...")
    from torch.distributed.distributed_c10d import PrefixStore  # not in every build of torch

    rank = dist.get_rank()
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return Crew(PrefixStore("lade/crew", dist.distributed_c10d._get_default_store()), rank)


def begin_together(model: Any) -> None:
    """What all processes do with a model that is split over them before the first call."""
    team_of(model)
    supports(model)


@contextmanager
def leading(model: Any, processes: int) -> Iterator[bool]:
    """A block of the first process, which the others help until it ends; they get False, and have nothing to do.

    They do not heed SIGTERM and Ctrl-C, which torchrun sends to all: the first process may have something to finish.
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
    follow_to_the_end(model)
    yield False
