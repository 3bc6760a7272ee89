"""The leading process: drafts, chooses, and announces each pass to the followers.

    process 0   draft ─ announce ─┬─ forward ─┬─ verify, learn, keep ── draft ─ ...
    process 1            receive ─┴─ forward ─┴─ receive ...

A message announces a pass before it is made. What only changes caches waits for the next message: a step takes one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.backends.processes.channel import Channel, digest, flat
from lade.decoding.loop import PromptLogitsHook
from lade.decoding.tree import TokenTree
from lade.errors import ClusterError, UnsupportedArgumentError
from lade.model.facts import ModelFacts
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan
from lade.model.prefill import PreparedPrompts
from lade.model.runner import EagerRunner


class Leader:
    """What one call tells the other processes.

    Args:
        channel: carries it.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._waiting: list[tuple[Any, ...]] = []
        self._numbers = count()
        self._in_pass = False

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self._channel.size

    def number(self, cache: TreeCache) -> int:
        """A number for a new cache, by which the others know theirs; they drop it when this one is collected."""
        number = next(self._numbers)
        weakref.finalize(cache, self._waiting.append, ("drop", number)).atexit = False
        return number

    def tell(self, *message: Any) -> None:
        """Send a message now, after those that wait."""
        waiting = self._waiting[:]
        del self._waiting[: len(waiting)]
        self._channel.send([*waiting, message])

    def defer(self, *message: Any) -> None:
        """Send a message with the next one. What a pass does by itself is not told."""
        if not self._in_pass:
            self._waiting.append(message)

    @contextmanager
    def passing(self, *message: Any) -> Iterator[None]:
        """A block that the other processes go through at the same time, once they are told.

        After an error in it they may wait for this one within a pass, for ever, so that all connections are ended.
        """
        self.tell(*message)
        self._in_pass = True
        try:
            yield
        except Exception as problem:
            self._channel.disconnect()
            raise ClusterError(
                f"a pass of {self._channel.size} processes failed in process 0 ({type(problem).__name__}: {problem}): "
                "start all of them again"
            ) from problem
        except BaseException:
            self._channel.disconnect()
            raise
        finally:
            self._in_pass = False


class LeadingCache(TreeCache):
    """A cache whose changes the other processes make, too.

    Args:
        leader: tells them.

    Attributes:
        number: by which they know theirs.
    """

    def __init__(self, leader: Leader) -> None:
        super().__init__()
        self._leader = leader
        self.number = leader.number(self)

    def _tell(self, name: str, *arguments: Any) -> None:
        self._leader.defer("cache", self.number, name, *arguments)

    def reset(self) -> None:
        """See `TreeCache`."""
        self._tell("reset")
        super().reset()

    def keep(self, paths: Sequence[Sequence[int]], fed: int, held: Sequence[int] | None = None) -> None:
        """See `TreeCache`."""
        self._tell("keep", [list(path) for path in paths], fed, None if held is None else list(held))
        super().keep(paths, fed, held)

    def repeat(self, tokens: int) -> None:
        """See `TreeCache`."""
        self._tell("repeat", tokens)
        super().repeat(tokens)

    def give_back(self, tokens: int) -> None:
        """See `TreeCache`."""
        self._tell("give_back", tokens)
        super().give_back(tokens)

    def crop(self, tokens_to_remove: int) -> None:
        """See `TreeCache`."""
        self._tell("crop", tokens_to_remove)
        super().crop(tokens_to_remove)

    def reserve(self, rows: int, slots: int) -> None:
        """See `TreeCache`."""
        self._tell("reserve", rows, slots)
        super().reserve(rows, slots)

    def leave(self, row: int) -> None:
        """See `TreeCache`."""
        self._tell("leave", row)
        super().leave(row)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """See `TreeCache`."""
        self._tell("batch_select_indices", indices.cpu())
        super().batch_select_indices(indices)

    def take(self, part: TreeCache) -> None:
        """See `TreeCache`; the part is one of this leader's."""
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
    """Makes passes together with the other processes.

    Args: those of `EagerRunner`, and

        leader: tells them.
    """

    shares_head = True
    """Whether the language model head, too, is one of all processes, which then run it over prompts together."""

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
        """See `EagerRunner`; there is text alone."""
        if prompts is not None:
            raise UnsupportedArgumentError(
                "a prompt with more than text cannot be used with a model that several processes decode",
                "give the text alone, or load the model with device_map",
            )
        return self

    def with_all_logits(self) -> LeadingRunner:
        """See `EagerRunner`; the others would have to return them, too."""
        raise UnsupportedArgumentError(
            "prompt_logprobs cannot be used with a model that several processes decode",
            "leave it out, or load the model with device_map",
        )

    def prefill(
        self, rows: Sequence[Sequence[int]], cache: TreeCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """See `EagerRunner`."""
        chunk = self.generation_config.prefill_chunk_size
        texts = [list(row) for row in rows]
        watched = hook is not None and self.shares_head
        with self._leader.passing("prefill", _number(cache), texts, watched, chunk, digest([], cache.lengths)):
            return super().prefill(rows, cache, hook)

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache) -> torch.Tensor:
        """See `EagerRunner`."""
        sent, lengths = list(map(flat, trees)), cache.lengths
        with self._leader.passing("forward", _number(cache), sent, digest(trees, lengths)):
            return super().forward(trees, rows, cache)

    def extend(self, trees: Sequence[TokenTree], held: Sequence[int], cache: TreeCache) -> torch.Tensor:
        """See `EagerRunner`."""
        sent, lengths = list(map(flat, trees)), cache.lengths
        with self._leader.passing("extend", _number(cache), sent, list(held), digest(trees, lengths)):
            return super().extend(trees, held, cache)


def _number(cache: TreeCache) -> int:
    assert isinstance(cache, LeadingCache), "a cache that the other processes do not know"
    return cache.number
