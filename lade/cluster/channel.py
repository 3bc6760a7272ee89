"""What the first process says to the others: one message a step, over a group of its own on the hosts.

A message is a Python object. It goes in one broadcast of fixed size, or in a second one if it is longer. The group does
not time out: a server may be idle for days. A process that ends closes its connections, which the others see at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from lade.errors import ClusterError

_FIXED_BYTES = 4096
_SIZE_BYTES = 8
_PATIENCE = timedelta(days=3650)

T = TypeVar("T")


class Channel:
    """Messages among all processes of this job; making one is a collective that all of them take part in.

    Attributes:
        rank: of this process; 0 sends.
        size: how many there are.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._buffer = torch.zeros(_FIXED_BYTES, dtype=torch.uint8)

    def send(self, message: object) -> None:
        """Send a message to all others."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        head = len(data).to_bytes(_SIZE_BYTES, "little")
        room = _FIXED_BYTES - _SIZE_BYTES
        _fill(self._buffer, head + data[:room])
        self._broadcast(self._buffer)
        if len(data) > room:
            self._broadcast(torch.frombuffer(bytearray(data[room:]), dtype=torch.uint8))

    def receive(self) -> Any:
        """Wait for the next message from the first process."""
        self._broadcast(self._buffer)
        head = bytes(self._buffer.numpy())
        size, room = int.from_bytes(head[:_SIZE_BYTES], "little"), _FIXED_BYTES - _SIZE_BYTES
        data = head[_SIZE_BYTES : _SIZE_BYTES + size]
        if size > room:
            rest = torch.empty(size - room, dtype=torch.uint8)
            self._broadcast(rest)
            data += bytes(rest.numpy())
        return pickle.loads(data)

    def gather(self, mine: T) -> list[T]:
        """What each process gives, by rank, for all of them."""
        found: list[Any] = [None] * self.size
        _guarded(lambda: dist.all_gather_object(found, mine, group=self._group))
        return found

    def _broadcast(self, buffer: torch.Tensor) -> None:
        _guarded(lambda: dist.broadcast(buffer, 0, group=self._group))


def is_connected() -> bool:
    """Whether this process is one of several that can reach each other."""
    return dist.is_initialized()


def disconnect() -> None:
    """End all connections of this process, so that those that wait for it stop waiting, with an error."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _fill(buffer: torch.Tensor, data: bytes) -> None:
    buffer.numpy()[: len(data)] = bytearray(data)


def _guarded(exchange: Callable[[], object]) -> None:
    """Make an exchange; what torch raises for a lost connection is said in our words."""
    try:
        exchange()
    except (RuntimeError, ValueError) as problem:
        reason = f"{type(problem).__name__}: {problem}".partition(". ")[0]
        raise ClusterError(f"another process of this job has gone ({reason}): start all of them again") from problem
