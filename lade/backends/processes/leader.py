"""The leader process: drafts, verifies, and announces each pass to the followers.

    process 0   draft ─ announce ─┬─ forward ─┬─ verify, learn, keep ── draft ─ ...
    process 1            receive ─┴─ forward ─┴─ receive ...

A message announces a pass before it runs. Operations that only change caches are sent with the next message, so a step
takes one message.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.backends.processes.channel import Channel, digest, flattened
from lade.decoding.loop import PromptLogitsHook
from lade.decoding.tree import TokenTree
from lade.errors import ClusterError, UnsupportedArgumentError
from lade.model.facts import ModelFacts
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan
from lade.model.prefill import PreparedPrompts
from lade.model.runner import EagerRunner


class Leader:
    """Announces the passes and cache operations of one call to the followers."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: list[tuple[Any, ...]] = []
        self._numbers = count()
        self._in_pass = False

    @property
    def size(self) -> int:
        """Number of processes."""
        return self._channel.size

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


class LeadingCache(TreeCache):
    """A cache whose changes are repeated by the followers.

    Attributes:
        number: number that identifies the cache in all processes.
    """

    def __init__(self, leader: Leader) -> None:
        super().__init__()
        self._leader = leader
        self.number = leader.number(self)

    def _announce(self, name: str, *arguments: Any) -> None:
        self._leader.defer("cache", self.number, name, *arguments)

    def reset(self) -> None:
        """See `TreeCache`."""
        self._announce("reset")
        super().reset()

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """See `TreeCache`."""
        self._announce("keep", [list(path) for path in paths], fed, None if held is None else list(held))
        super().keep(paths, fed, held)

    def repeat(self, tokens: int) -> None:
        """See `TreeCache`."""
        self._announce("repeat", tokens)
        super().repeat(tokens)

    def give_back(self, tokens: int) -> None:
        """See `TreeCache`."""
        self._announce("give_back", tokens)
        super().give_back(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """See `TreeCache`."""
        self._announce("crop", tokens_to_remove)
        super().crop(tokens_to_remove)

    def reserve(self, rows: int, slots: int) -> None:
        """See `TreeCache`."""
        self._announce("reserve", rows, slots)
        super().reserve(rows, slots)

    def leave(self, row: int) -> None:
        """See `TreeCache`."""
        self._announce("leave", row)
        super().leave(row)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """See `TreeCache`."""
        self._announce("batch_select_indices", indices.cpu())
        super().batch_select_indices(indices)

    def take(self, part: TreeCache) -> None:
        """See `TreeCache`; `part` must be a cache of this leader."""
        assert isinstance(part, LeadingCache)
        self._leader.defer("take", self.number, part.number)
        super().take(part)

    def copy_row(self, row: int, tokens: int) -> TreeCache:
        """See `TreeCache`."""
        copy = self._empty()
        self._leader.defer("copy", self.number, copy.number, row, tokens)
        copy.adopt(super().copy_row(row, tokens))
        return copy

    def _empty(self) -> LeadingCache:
        return LeadingCache(self._leader)


class LeadingRunner(EagerRunner):
    """Runs passes together with the followers.

    Args:
        model: a transformers model, see `EagerRunner`.
        plan: how the model takes its masks.
        generation_config: generation settings, see `EagerRunner`.
        leader: leader that announces the passes.
        facts: survey of the model, see `EagerRunner`.
    """

    exposes_states = False
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

    def tree_cache(self) -> TreeCache:
        """See `EagerRunner`."""
        return LeadingCache(self._leader)

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> LeadingCache:
        """See `EagerRunner`."""
        return LeadingCache(self._leader)

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
        with self._leader.announced("prefill", _number(cache), texts, watched, chunk, digest([], cache.lengths)):
            return super().prefill(rows, cache, hook)

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache) -> torch.Tensor:
        """See `EagerRunner`."""
        sent, lengths = list(map(flattened, trees)), cache.lengths
        with self._leader.announced("forward", _number(cache), sent, digest(trees, lengths)):
            return super().forward(trees, rows, cache)

    def extend(self, trees: Sequence[TokenTree], held: Sequence[int], cache: TreeCache) -> torch.Tensor:
        """See `EagerRunner`."""
        sent, lengths = list(map(flattened, trees)), cache.lengths
        with self._leader.announced("extend", _number(cache), sent, list(held), digest(trees, lengths)):
            return super().extend(trees, held, cache)


def _number(cache: TreeCache) -> int:
    assert isinstance(cache, LeadingCache), "the cache is unknown to the other processes"
    return cache.number
