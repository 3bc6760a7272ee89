"""A following process: makes the passes that the leader announces."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.backends.processes.channel import Channel, Flat, digest, grown, set_generator_states, unpacked
from lade.backends.processes.lookahead_parallel import PartRunner
from lade.decoding.tree import TokenTree
from lade.errors import ClusterError
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner
from lade.model.support.supports import supports
from lade.stats import Step


class DismissedError(ClusterError):
    """The first process needs the others no more."""


Plainly = Callable[[dict[str, Any]], Any]
"""Decodes plainly, given arguments of `model.generate`."""


class Follower:
    """Takes part in one call of the first process.

    Args:
        channel: brings its messages.
        model: this process's part of the model, or its copy.
        plainly: for calls that are decoded plainly.
        runner: makes this process's passes.

    Attributes:
        ended: whether the first process has ended the call.
    """

    def __init__(
        self, channel: Channel, model: PreTrainedModel, plainly: Plainly, runner: type[EagerRunner] = EagerRunner
    ) -> None:
        self._channel, self._model, self._plainly, self._made_by = channel, model, plainly, runner
        self._plan: MaskPlan | None = None
        self._caches: dict[int, TreeCache] = {}
        self.ended = False

    def steps(self) -> Generator[Step, None, Any]:
        """Follow to the end. Yields the steps of a stream; returns what the call returned, or raises what it raised."""
        while True:
            for kind, *arguments in self._channel.receive():
                if kind == "step":
                    yield arguments[0]
                elif kind == "end":
                    return self._end(*arguments)
                elif kind == "dismiss":
                    self.ended = True
                    raise DismissedError("process 0 makes no more calls")
                else:
                    getattr(self, f"_{kind}")(*arguments)

    def _end(self, result: bytes | None, problem: BaseException | None, states: list[torch.Tensor]) -> Any:
        self.ended = True
        self._caches.clear()
        set_generator_states(self._model.device, states)
        if problem is not None:
            problem.add_note("raised in process 0, and passed on to this one")
            raise problem
        return None if result is None else unpacked(result, self._model.device)

    def _prefill(self, number: int, rows: list[list[int]], watched: bool, chunk: int | None, sent: int) -> None:
        cache = self._cache(number)
        _compare(sent, [], cache)
        # the head runs over the whole prompt in all processes or in none
        self._runner(chunk).prefill(rows, cache, _no_hook if watched else None)

    def _forward(self, number: int, flat: list[Flat], sent: int) -> None:
        trees, cache = [grown(*each) for each in flat], self._cache(number)
        _compare(sent, trees, cache)
        self._runner().forward(trees, [tree.ids[:1] for tree in trees], cache)

    def _read(self, number: int, flat: list[Flat], wants_entries: bool, sent: int) -> None:
        trees, cache = [grown(*each) for each in flat], self._cache(number)
        _compare(sent, trees, cache)
        runner = self._runner()
        assert isinstance(runner, PartRunner), "only parts of a tree are read where they were fed"
        runner.read(trees, [tree.ids[:1] for tree in trees], cache, wants_entries=wants_entries)

    def _extend(self, number: int, flat: list[Flat], held: list[int], sent: int) -> None:
        trees, cache = [grown(*each) for each in flat], self._cache(number)
        _compare(sent, trees, cache)
        self._runner().extend(trees, held, cache)

    def _plain(self, arguments: bytes, states: list[torch.Tensor]) -> None:
        set_generator_states(self._model.device, states)
        self._plainly(unpacked(arguments, self._model.device))

    def _join(self) -> None:
        self._plan = supports(self._model).plan

    def _drop(self, number: int) -> None:
        self._caches.pop(number, None)

    def _take(self, number: int, part: int) -> None:
        self._cache(number).take(self._cache(part))

    def _copy(self, number: int, copy: int, row: int, tokens: int) -> None:
        self._caches[copy] = self._cache(number).copy_row(row, tokens)

    def _cache(self, number: int, name: str = "", *arguments: Any) -> TreeCache:
        """The cache of this number, after a method of it was called if one is named."""
        if number not in self._caches:
            self._caches[number] = self._runner().tree_cache()
        cache = self._caches[number]
        if name:
            getattr(cache, name)(*arguments)
        return cache

    def _runner(self, chunk: int | None = None) -> EagerRunner:
        assert self._plan is not None, "a model that is not supported makes no passes"
        return self._made_by(self._model, self._plan, GenerationConfig(prefill_chunk_size=chunk))


def _no_hook(rows: Sequence[int], start: int, logits: torch.Tensor) -> None:
    """For the logits of a prompt, which the first process reads."""


def _compare(sent: int, trees: Sequence[TokenTree], cache: TreeCache) -> None:
    if digest(trees, cache.lengths) != sent:
        raise ClusterError(
            "the tree of this process, or what it has cached before it, is not that of process 0: both would return a "
            "wrong text; start all of them again, and report this"
        )
