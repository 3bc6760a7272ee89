"""The leader process: drafts, verifies, and announces each pass to the followers in one broadcast per step.

    process 0   draft ─ announce ─┬─ forward ─┬─ verify, learn, keep ── draft ─ ...
    process 1            receive ─┴─ forward ─┴─ receive ...

A message announces a pass before it runs. Operations that only change caches are sent with the next message, so a step
takes one message.

Two trees of equal size with different tokens would give a wrong text without any error: each layer of a split model
would add up partial results of different tokens. So a digest is sent with each tree, and the receiver compares it.

A message is a Python object. It is sent in one broadcast of fixed size, and in a second one if it is longer. The group
has no timeout: a server may be idle for days. A process that exits closes its connections, which the others notice at
once.
"""

from __future__ import annotations

import pickle
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from io import BytesIO
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist
from transformers import GenerationConfig, PreTrainedModel

from lade.decoding.loop import PromptLogitsHook
from lade.decoding.tree import TokenTree
from lade.errors import ClusterError, UnsupportedArgumentError
from lade.model.facts import ModelFacts
from lade.model.inputs import MaskPlan
from lade.model.kv_cache import TreeCache
from lade.model.prefill import PreparedPrompts
from lade.model.runner import EagerRunner

FlatTree = tuple[list[int], list[int]]
"""Ids and parents of the nodes of a tree."""
T = TypeVar("T")
NOT_CONNECTED = "the processes of this model are no longer connected: restart all of them"
_FIXED_BYTES = 4096
_SIZE_BYTES = 8
_PATIENCE = timedelta(days=3650)


class Channel:
    """Messages among all processes of this job; rank 0 sends. Creating one is a collective operation."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._groups = [dist.new_group(backend="gloo", timeout=_PATIENCE)]
        self._release = weakref.finalize(self, _destroy, self._groups)  # at interpreter exit at the latest
        self._buffer = torch.zeros(_FIXED_BYTES, dtype=torch.uint8)

    def send(self, message: object) -> None:
        """Send a message to all other processes."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        head = len(data).to_bytes(_SIZE_BYTES, "little")
        room = _FIXED_BYTES - _SIZE_BYTES
        self._buffer.numpy()[: len(head) + len(data[:room])] = bytearray(head + data[:room])
        self._broadcast(self._buffer)
        if len(data) > room:
            self._broadcast(torch.frombuffer(bytearray(data[room:]), dtype=torch.uint8))

    def receive(self) -> Any:
        """Wait for the next message of rank 0."""
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
        """Return the objects that all processes give, by rank."""
        found: list[Any] = [None] * self.size
        self._guarded(lambda group: dist.all_gather_object(found, mine, group=group))
        return found

    def disconnect(self) -> None:
        """Close all connections of this process, so that processes waiting for it fail instead of hanging.

        Torch closes those of a destroyed group with the last reference to it. Layers of a split model hold references
        of their own, which end with the process.
        """
        self._release()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _broadcast(self, buffer: torch.Tensor) -> None:
        self._guarded(lambda group: dist.broadcast(buffer, 0, group=group))

    def _guarded(self, exchange: Callable[[Any], object]) -> None:
        """Run a collective on the group; errors of a lost connection become `ClusterError`.

        The traceback is dropped, since its frames hold the group: whoever kept the error would keep the group open.
        """
        if not self._groups:
            raise ClusterError(NOT_CONNECTED)
        try:
            exchange(self._groups[0])
        except (RuntimeError, ValueError) as problem:
            reason = f"{type(problem).__name__}: {problem}".partition(". ")[0]
            gone = ClusterError(f"another process of this job has exited ({reason}): restart all of them")
            raise gone from problem.with_traceback(None)


def connect() -> None:
    """Initialise torch's process group as torchrun configures it, unless done already.

    It is closed at interpreter exit. Groups left open may abort the process then: gloo's threads hold the tensors of
    the last exchange a little longer, and need the interpreter to free them. Groups are closed by finalizers rather
    than by `atexit`, since these run last in, first out: open engines and streams end first.
    """
    if not dist.is_initialized():
        dist.init_process_group()
        weakref.finalize(dist, _close, weakref.ref(dist.group.WORLD))


def packed(thing: Any) -> bytes:
    """Serialise any object that can be pickled, tensors included."""
    buffer = BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


def unpacked(data: bytes, device: torch.device) -> Any:
    """Deserialise the output of `packed`; tensors go to this process's device, those of the CPU stay there."""

    def moved(storage: Any, where: str) -> Any:
        return storage if where == "cpu" else storage.to(device=device)

    return torch.load(BytesIO(data), map_location=moved, weights_only=False)


def sendable(problem: BaseException) -> BaseException:
    """Return the error itself if it can be pickled; otherwise a `ClusterError` with its message."""
    try:
        copy = pickle.loads(pickle.dumps(problem))
    except Exception:  # noqa: BLE001 - any class may fail in its own way, and the words are enough
        copy = None
    if type(copy) is type(problem) and str(copy) == str(problem):
        return problem
    return ClusterError(f"process 0 failed with {type(problem).__name__}: {problem}")


def generator_states(device: torch.device) -> list[torch.Tensor]:
    """Return the states of torch's generators that a generation on this device draws from."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def set_generator_states(device: torch.device, states: list[torch.Tensor]) -> None:
    """Set the generators to the states of another process."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


def flattened(tree: TokenTree) -> FlatTree:
    """Return the form in which a tree is sent."""
    return tree.ids, tree.parents


def unflattened(ids: Sequence[int], parents: Sequence[int]) -> TokenTree:
    """Rebuild a tree from the form in which it was sent."""
    tree = TokenTree(ids[0])
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    tree.extend(ids[1:], parents[1:], depths[1:], "sent")
    return tree


def digest(trees: Sequence[TokenTree], lengths: Sequence[int]) -> int:
    """Return a checksum of trees, and of the number of cached tokens before each of them."""
    numbers = [number for tree in trees for number in (len(tree), *tree.ids, *tree.parents)]
    return zlib.crc32(np.array([*numbers, *lengths], dtype=np.int64).tobytes())


def _close(group: weakref.ref[Any]) -> None:
    """Destroy the process group, unless that is done; a group opened by others since then is left alone."""
    if dist.is_initialized() and dist.group.WORLD is group():
        dist.destroy_process_group()


def _destroy(groups: list[Any]) -> None:
    """Destroy a channel's group, and drop it."""
    while groups:
        with suppress(ValueError, AssertionError):  # the default group was destroyed, and this group with it
            dist.destroy_process_group(groups.pop())


class Leader:
    """Announces the passes and cache operations of one call to the followers."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self.size = channel, channel.size
        self._waiting: list[tuple[Any, ...]] = []
        self._numbers = count()
        self._in_pass = False

    def number(self, cache: TreeCache) -> int:
        """Return a number that identifies a new cache in all processes; it is dropped when this one is collected."""
        number = next(self._numbers)
        weakref.finalize(cache, self._waiting.append, ("drop", number)).atexit = False
        return number

    def send(self, *message: Any) -> None:
        """Send a message now, after the deferred ones."""
        waiting = self._waiting[:]
        del self._waiting[: len(waiting)]
        self._channel.send([*waiting, message])

    def defer(self, *message: Any) -> None:
        """Send a message along with the next one. Ignored within a pass, which followers run themselves."""
        if not self._in_pass:
            self._waiting.append(message)

    @contextmanager
    def announced(self, *message: Any) -> Iterator[None]:
        """Announce a block that the followers run at the same time.

        After an error in it, followers may wait within a pass forever, so all connections are closed.
        """
        self.send(*message)
        self._in_pass = True
        try:
            yield
        except Exception as problem:
            self._channel.disconnect()
            raise ClusterError(
                f"a pass of {self._channel.size} processes failed in process 0 ({type(problem).__name__}: {problem}): "
                "restart all of them"
            ) from problem
        except BaseException:
            self._channel.disconnect()
            raise
        finally:
            self._in_pass = False


def _repeated(name: str) -> Any:
    """Return a method of a cache that followers repeat with the same arguments."""

    def method(self: LeadingCache, *arguments: Any) -> None:
        self._leader.defer("cache", self.number, name, *arguments)
        getattr(super(LeadingCache, self), name)(*arguments)

    return method


class LeadingCache(TreeCache):
    """A cache whose changes are repeated by the followers, which know it by its number."""

    def __init__(self, leader: Leader) -> None:
        super().__init__()
        self._leader = leader
        self.number = leader.number(self)

    reset = _repeated("reset")
    repeat = _repeated("repeat")
    give_back = _repeated("give_back")
    reserve = _repeated("reserve")
    leave = _repeated("leave")
    _keep = _repeated("keep")
    _select = _repeated("batch_select_indices")

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """See `TreeCache`."""
        self._keep([list(path) for path in paths], fed, None if held is None else list(held))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """See `TreeCache`."""
        self._select(indices.cpu())

    def take(self, part: TreeCache) -> None:
        """See `TreeCache`; `part` must be a cache of this leader."""
        assert isinstance(part, LeadingCache)
        self._leader.defer("take", self.number, part.number)
        super().take(part)

    def copy_row(self, row: int, tokens: int) -> TreeCache:
        """See `TreeCache`."""
        copy = type(self)(self._leader)
        self._leader.defer("copy", self.number, copy.number, row, tokens)
        copy.adopt(super().copy_row(row, tokens))
        return copy


class LeadingRunner(EagerRunner):
    """Runs passes together with the followers, to which the leader announces them."""

    exposes_states = False
    caches: type[LeadingCache] = LeadingCache
    shares_head = True
    """True if the language model head is split as well, so that all processes run it over prompts."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: MaskPlan,
        generation_config: GenerationConfig,
        leader: Leader,
        facts: ModelFacts | None = None,
    ) -> None:
        super().__init__(model, plan, generation_config, facts)
        self._leader, self.processes = leader, leader.size

    def tree_cache(self) -> LeadingCache:
        """See `EagerRunner`."""
        return self.caches(self._leader)

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> LeadingCache:
        """See `EagerRunner`."""
        return self.tree_cache()

    def for_prompts(self, prompts: PreparedPrompts | None) -> LeadingRunner:
        """See `EagerRunner`; prompts must be text alone."""
        if prompts is not None:
            raise UnsupportedArgumentError(
                "a prompt with more than text cannot be used with a model decoded by several processes",
                "give text only, or load the model with device_map",
            )
        return self

    def with_all_logits(self) -> LeadingRunner:
        """See `EagerRunner`; unsupported, since followers do not return logits."""
        raise UnsupportedArgumentError(
            "prompt_logprobs cannot be used with a model decoded by several processes",
            "leave it out, or load the model with device_map",
        )

    def prefill(
        self, rows: Sequence[Sequence[int]], cache: TreeCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """See `EagerRunner`."""
        chunk = self.generation_config.prefill_chunk_size
        texts = [list(row) for row in rows]
        watched = hook is not None and self.shares_head
        with self._announced("prefill", [], cache, texts, watched, chunk):
            return super().prefill(rows, cache, hook)

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache) -> torch.Tensor:
        """See `EagerRunner`."""
        with self._announced("forward", trees, cache):
            return super().forward(trees, rows, cache)

    def extend(self, trees: Sequence[TokenTree], held: Sequence[int], cache: TreeCache) -> torch.Tensor:
        """See `EagerRunner`."""
        with self._announced("extend", trees, cache, list(held)):
            return super().extend(trees, held, cache)

    def _announced(
        self, kind: str, trees: Sequence[TokenTree], cache: TreeCache, *more: Any
    ) -> AbstractContextManager[None]:
        """Announce a pass, which is run in the context; followers compare trees and cache with their own."""
        assert isinstance(cache, LeadingCache), "the cache is unknown to the other processes"
        sent = list(map(flattened, trees))
        return self._leader.announced("pass", kind, cache.number, sent, digest(trees, cache.lengths), *more)
