"""A follower process: runs the passes that the leader announces."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.backends.processes.leader import Channel, FlatTree, digest, set_generator_states, unflattened, unpacked
from lade.backends.processes.lookahead_parallel import PartRunner
from lade.decoding.tree import TokenTree
from lade.errors import ClusterError
from lade.model.inputs import MaskPlan
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.model.supports import supports
from lade.stats import Step


class DismissedError(ClusterError):
    """The leader makes no more calls."""


PlainDecode = Callable[[dict[str, Any]], Any]
"""Runs plain decoding with the given arguments of `model.generate`."""


class Follower:
    """Takes part in one call of the leader."""

    def __init__(
        self,
        channel: Channel,
        model: PreTrainedModel,
        plain_decode: PlainDecode,
        runner: type[EagerRunner] = EagerRunner,
    ) -> None:
        self._channel, self._model, self._plain_decode, self._made_by = channel, model, plain_decode, runner
        self._plan: MaskPlan | None = None
        self._caches: dict[int, TreeCache] = {}
        self.ended = False  # true once the leader has ended the call

    def steps(self) -> Generator[Step, None, Any]:
        """Follow the call to its end: yield the steps of a stream, and return or raise what the call did."""
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
            problem.add_note("raised in process 0, and re-raised in this one")
            raise problem
        return None if result is None else unpacked(result, self._model.device)

    def _pass(self, kind: str, number: int, flattened: list[FlatTree], sent: int, *more: Any) -> None:
        """Run a pass with the others, if trees and cache are those of the leader, whose digest is `sent`."""
        trees, cache = [unflattened(*each) for each in flattened], self._cache(number)
        if digest(trees, cache.lengths) != sent:
            raise ClusterError(
                "the tree or the cache of this process differs from that of process 0, so both would return a "
                "wrong text: restart all of them, and report this"
            )
        getattr(self, f"_{kind}")(trees, cache, *more)

    def _prefill(
        self, _: list[TokenTree], cache: TreeCache, rows: list[list[int]], watched: bool, chunk: int | None
    ) -> None:
        # either all processes run the head over the whole prompt, or none; only the leader reads its logits
        self._runner(chunk).prefill(rows, cache, (lambda rows, start, logits: None) if watched else None)

    def _forward(self, trees: list[TokenTree], cache: TreeCache) -> None:
        self._runner().forward(trees, [tree.ids[:1] for tree in trees], cache)

    def _read(self, trees: list[TokenTree], cache: TreeCache, wants_entries: bool) -> None:
        runner = self._runner()
        assert isinstance(runner, PartRunner), "only processes that feed parts of a tree read logits"
        runner.read(trees, [tree.ids[:1] for tree in trees], cache, wants_entries=wants_entries)

    def _extend(self, trees: list[TokenTree], cache: TreeCache, held: list[int]) -> None:
        self._runner().extend(trees, held, cache)

    def _plain(self, arguments: bytes, states: list[torch.Tensor]) -> None:
        set_generator_states(self._model.device, states)
        self._plain_decode(unpacked(arguments, self._model.device))

    def _join(self) -> None:
        self._plan = supports(self._model).plan

    def _drop(self, number: int) -> None:
        self._caches.pop(number, None)

    def _take(self, number: int, part: int) -> None:
        self._cache(number).take(self._cache(part))

    def _copy(self, number: int, copy: int, row: int, tokens: int) -> None:
        self._caches[copy] = self._cache(number).copy_row(row, tokens)

    def _cache(self, number: int, name: str = "", *arguments: Any) -> TreeCache:
        """Return the cache of a number, after calling one of its methods if `name` is given."""
        if number not in self._caches:
            self._caches[number] = self._runner().tree_cache()
        cache = self._caches[number]
        if name:
            getattr(cache, name)(*arguments)
        return cache

    def _runner(self, chunk: int | None = None) -> EagerRunner:
        assert self._plan is not None, "an unsupported model runs no passes"
        return self._made_by(self._model, self._plan, GenerationConfig(prefill_chunk_size=chunk))
