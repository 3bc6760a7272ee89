"""Messages from the leader to its followers: packed objects, trees, one broadcast per step.

Two trees of equal size with other tokens give a wrong text without any error: each layer of a split model would add up
partial results of different tokens. So with each tree goes a digest, and who receives it compares.

A message is a Python object. It goes in one broadcast of fixed size, or in a second one if it is longer. The group does
not time out: a server may be idle for days. A process that ends closes its connections, which the others see at once.
"""

from __future__ import annotations

import pickle
import weakref
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist

from lade.decoding.tree import TokenTree
from lade.errors import ClusterError


def packed(thing: Any) -> bytes:
    """Anything that can be pickled, tensors in it included."""
    buffer = BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def unpacked(data: bytes, device: torch.device) -> Any:
    """What `packed` was given, its tensors on this process's device; the CPU's stay there."""

    def moved(storage: Any, where: str) -> Any:
        return storage if where == "cpu" else storage.to(device=device)

    return torch.load(BytesIO(data), map_location=moved, weights_only=False)


def sendable(problem: BaseException) -> BaseException:
    """The error itself, where it can be pickled; else one of ours with its words."""
    try:
        copy = pickle.loads(pickle.dumps(problem))
    except Exception:  # noqa: BLE001 - any class may fail in its own way, and the words are enough
        copy = None
    if type(copy) is type(problem) and str(copy) == str(problem):
        return problem
    return ClusterError(f"process 0 failed with {type(problem).__name__}: {problem}")


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """Of torch's generators that a generation on this device draws from."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def set_generator_states(device: torch.device, states: list[torch.Tensor]) -> None:
    """Have the generators go on as those of another process."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


Flat = tuple[list[int], list[int]]
"""Ids and parents of the nodes of a tree."""


def flat(tree: TokenTree) -> Flat:
    """A tree as it is sent."""
    return tree.ids, tree.parents


def grown(ids: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """The tree that was sent."""
    tree = TokenTree(ids[0])
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tree.extend(ids[1:], parents[1:], depths[1:], "sent")
    return tree


def digest(trees: Sequence[TokenTree], lengths: Sequence[int]) -> int:
    """Of trees, and of how many tokens are cached before each of them."""
    numbers = [number for tree in trees for number in (len(tree), *tree.ids, *tree.parents)]
    return zlib.crc32(np.array([*numbers, *lengths], dtype=np.int64).tobytes())


_FIXED_BYTES = 4096
_SIZE_BYTES = 8
_PATIENCE = timedelta(days=3650)
NOT_CONNECTED = "the processes of this model are not connected any more: start all of them again"

T = TypeVar("T")


class Channel:
    """Messages among all processes of this job; making one is a collective that all of them take part in.

    Attributes:
        rank: of this process; 0 sends.
        size: how many there are.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._groups = [dist.new_group(backend="gloo", timeout=_PATIENCE)]
        self._release = weakref.finalize(self, _destroy, self._groups)  # at the latest when Python ends
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
        self._guarded(lambda group: dist.all_gather_object(found, mine, group=group))
        return found

    def disconnect(self) -> None:
        """End all connections of this process, so that those that wait for it stop waiting, with an error.

        Torch closes those of a group that is destroyed only with the last reference to it. Layers of a split model hold
        some of their own, which end with the process.
        """
        self._release()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _broadcast(self, buffer: torch.Tensor) -> None:
        self._guarded(lambda group: dist.broadcast(buffer, 0, group=group))

    def _guarded(self, exchange: Callable[[Any], object]) -> None:
        """Make an exchange over the group; what torch raises for a lost connection is said in our words.

        Without the traceback of that, whose frames hold the group: whoever keeps the error would keep it open.
        """
        if not self._groups:
            raise ClusterError(NOT_CONNECTED)
        try:
            exchange(self._groups[0])
        except (RuntimeError, ValueError) as problem:
            reason = f"{type(problem).__name__}: {problem}".partition(". ")[0]
            gone = ClusterError(f"another process of this job has gone ({reason}): start all of them again")
            raise gone from problem.with_traceback(None)


def connect() -> None:
    """Connect this process with the others of its job, as torchrun says, unless it is; until Python ends.

    Groups that are left open may abort the process then: gloo's threads hold the tensors of the last exchange a moment
    longer, and to free them they need the interpreter, which may have gone. They are closed by finalizers rather than
    by `atexit`, as these run from the youngest to the oldest: calls of engines and streams that are open end first.
    """
    if not dist.is_initialized():
        dist.init_process_group()
        weakref.finalize(dist, _close, weakref.ref(dist.group.WORLD))


def _close(group: weakref.ref[Any]) -> None:
    """End the connections of this process, unless that is done; what others have opened since is theirs."""
    if dist.is_initialized() and dist.group.WORLD is group():
        dist.destroy_process_group()


def _destroy(groups: list[Any]) -> None:
    """Destroy a channel's group, and forget it."""
    while groups:
        with suppress(ValueError, AssertionError):  # the job's connections have ended, and this group's with them
            dist.destroy_process_group(groups.pop())


def is_connected() -> bool:
    """Whether this process is one of several that can reach each other."""
    return dist.is_initialized()


def _fill(buffer: torch.Tensor, data: bytes) -> None:
    buffer.numpy()[: len(data)] = bytearray(data)
