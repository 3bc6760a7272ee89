"""`GraphRunner`: run a model by captured passes.

    trees ──▶ StaticInputs.fill ──▶ replay ──▶ logits [B, S, V] ──▶ read: the one place where a step waits
               one copy              one graph of the shape (B, S, K): mask, model, cache update

A shape is captured when it is first needed. Prefill, whose shapes differ, runs eagerly, and so does every pass on a
cache that has ceased to be static because memory ran out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lade.backends.cuda_graphs.buffers import NodeBuffers, StepShape
from lade.backends.cuda_graphs.capture import Recording
from lade.backends.cuda_graphs.fallback_cache import FallbackCache
from lade.backends.cuda_graphs.pass_inputs import ClosureAncestry, StaticCacheView, StaticInputs
from lade.backends.cuda_graphs.pool import BufferPool
from lade.backends.cuda_graphs.static_cache import StaticCache, StaticRows
from lade.decoding.loop import PromptLogitsHook
from lade.decoding.tree import TokenTree
from lade.model.facts import ModelFacts
from lade.model.inputs import STEP_SIZES, step_bucket
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner


@dataclass(frozen=True)
class CapturedPass:
    """One captured pass, the inputs it reads, and what it leaves to be folded into states."""

    inputs: StaticInputs
    nodes: NodeBuffers
    recording: Recording


@dataclass(frozen=True)
class PreparedStep:
    """A captured pass that is about to be replayed, its shape, and the cache on whose buffers it works."""

    cache: StaticCache
    shape: StepShape
    captured: CapturedPass


class GraphRunner(EagerRunner):
    """Pads each step to one of a few shapes, and replays what was captured of it.

    Args:
        model: see `EagerRunner`; `why_eager` in `backend.py` says which models can be captured.
        plan: how the model takes its masks.
        generation_config: see `EagerRunner`.
        pool: holds the buffers and what is captured on them.
        facts: see `EagerRunner`.
    """

    sizing = StaticCache

    def __init__(
        self,
        model: PreTrainedModel,
        plan: MaskPlan,
        generation_config: GenerationConfig,
        pool: BufferPool,
        facts: ModelFacts | None = None,
    ) -> None:
        super().__init__(model, plan, generation_config, facts)
        self._pool = pool
        self._least_step = (
            1 if self._recurrence is None else 2
        )  # models change their states by themselves for one token
        self.step_sizes = [size for size in STEP_SIZES if size >= self._least_step]

    def eager(self) -> EagerRunner:
        """See `EagerRunner.eager`."""
        return EagerRunner(self.model, self.plan, self.generation_config, self.facts)

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> FallbackCache:
        """See `EagerRunner.new_cache`; static, unless captures of this model fail."""
        return self._fallback_cache(tokens, limit)

    def borrow(self, given: Cache, tokens: int, *, handed_out: bool) -> FallbackCache:
        """See `EagerRunner.borrow`; `given` is an empty `TreeCache`, as a user's own has no fixed addresses."""
        return self._fallback_cache(tokens, None, cast(TreeCache, given) if handed_out else None)

    def _fallback_cache(
        self, tokens: int | None, limit: int | None, handed_out: TreeCache | None = None
    ) -> FallbackCache:
        def make_static() -> StaticCache | None:
            return None if self._pool.capture_failed_in is not None else self._static_cache(tokens, limit)

        return FallbackCache(make_static, handed_out)

    def _static_cache(self, tokens: int | None, limit: int | None = None) -> StaticCache:
        return StaticCache(tokens, limit=limit, pool=self._pool)

    def host(self, cache: TreeCache, tokens: int) -> StaticCache:
        """See `EagerRunner.host`; a static cache, which nothing replaces.

        Raises:
            torch.OutOfMemoryError: there is no memory for it; likewise a `forward` that works on it.
        """
        static = self._static_cache(tokens)
        static.join([cache], [(0, row) for row in range(len(cache.lengths))])
        return static

    def pass_sizes(self, largest: int) -> list[int]:
        """See `EagerRunner.pass_sizes`."""
        return sorted({step_bucket(max(size, self._least_step)) for size in range(1, largest + 1)})

    @torch.no_grad()
    def prefill(  # type: ignore[override]  # each kind of runner has caches of its own kind
        self, rows: Sequence[Sequence[int]], cache: FallbackCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """See `EagerRunner.prefill`; the cache is to be empty."""
        filled = TreeCache()
        logits = super().prefill(rows, filled, hook)
        cache.adopt(filled)
        return logits

    @torch.no_grad()
    def forward(  # type: ignore[override]  # likewise
        self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: StaticCache | FallbackCache
    ) -> torch.Tensor:
        """See `EagerRunner.forward`; the next pass may overwrite the logits."""
        step = cache.try_static(lambda static: self._prepare(trees, static))
        if step is not None:
            return self._replay(step, trees)
        assert cache.dynamic is not None
        return super().forward(trees, rows, cache.dynamic)

    def _prepare(self, trees: Sequence[TokenTree], cache: StaticCache) -> PreparedStep:
        """All that may need memory: slots in the cache, and the pass of this shape, captured now if it never was."""
        size = max(self._least_step, *map(len, trees))
        cache.make_room(size)
        shape, buffers = cache.shape(size), cache.buffers
        found: CapturedPass | None = buffers.passes.get(shape)
        if found is None:
            inputs = StaticInputs(shape.rows, shape.size, self.device, shape.axes)
            inputs.fill(trees, cache.lengths, cache.rows.offsets)  # a capture begins with real calls
            found = buffers.passes[shape] = self._record(shape, cache.rows, inputs)
        return PreparedStep(cache, shape, found)

    def _record(self, shape: StepShape, rows: StaticRows, inputs: StaticInputs) -> CapturedPass:
        buffers, nodes = rows.buffers, NodeBuffers(rows.buffers.states)
        recording = self._pool.record(
            buffers, lambda: self._static_pass(shape, rows, inputs, nodes), [inputs.memory, *buffers.fixed]
        )
        return CapturedPass(inputs, nodes, recording)

    def _replay(self, step: PreparedStep, trees: Sequence[TokenTree]) -> torch.Tensor:
        cache, shape, inputs, nodes = step.cache, step.shape, step.captured.inputs, step.captured.nodes
        size = max(map(len, trees))
        self._stopwatch.start(self.device)
        inputs.fill(trees, cache.lengths, cache.rows.offsets)
        logits = step.captured.recording.replay(lambda: self._static_pass(shape, cache.rows, inputs, nodes))
        self._stopwatch.stop(logits.device)
        cache.rows.fed(size, shape, None if self._recurrence is None else nodes)
        return logits[: len(trees), :size]

    def _static_pass(
        self, shape: StepShape, rows: StaticRows, inputs: StaticInputs, nodes: NodeBuffers
    ) -> torch.Tensor:
        """The pass itself, all that a graph holds: logits `[B, S, V]`, and what its nodes leave for states."""
        step = inputs.tree_step(shape.keys) if self.plan.compact else inputs.step(shape.keys)
        view = StaticCacheView(rows.layers, rows.buffers, inputs.slots(), shape)
        arguments = self._arguments(step, view, inputs.offsets)
        with ExitStack() as stack:
            stack.enter_context(self._slot_patches.patched_for(step))
            if self._recurrence is not None:
                ancestry = ClosureAncestry(inputs.closure)
                view.begin(ancestry)
                stack.enter_context(self._recurrence.patched_for(ancestry))
            logits: torch.Tensor = self.model(**arguments).logits
        nodes.take(view.recurrent)
        return logits
