"""Runs a model by passes that were captured once and are replayed: on a GPU, launching them takes longer than they do.

    trees ──▶ StaticInputs.fill ──▶ replay ──▶ logits [B, S, V] ──▶ read: the one place where a step waits
               one copy              one graph of the shape (B, S, K): mask, model, cache update

A shape is captured when it is first needed. Prefill, whose shapes differ, runs as it always does. So does all that is
asked for with a cache that is not static, or is so no more since memory has run out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.decoding.loop import PromptLogitsHook
from lade.decoding.tree import TokenTree
from lade.model.cuda_graphs.buffers import Buffers, Frame, Shape
from lade.model.cuda_graphs.capture import Recording
from lade.model.cuda_graphs.fallback_cache import GraphCache
from lade.model.cuda_graphs.inputs import StaticInputs
from lade.model.cuda_graphs.static_cache import StaticCache
from lade.model.cuda_graphs.workspace import Workspace, setup_of
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner
from lade.model.shapes import STEP_SIZES


@dataclass(frozen=True)
class Pass:
    """One captured pass, and what it reads."""

    inputs: StaticInputs
    recording: Recording


@dataclass(frozen=True)
class Turn:
    """A pass that is about to be made, of some shape, on the buffers of a cache."""

    cache: StaticCache
    shape: Shape
    captured: Pass


class GraphRunner(EagerRunner):
    """Pads each step to one of a few shapes, and replays what was captured of it.

    Args:
        model: see `EagerRunner`; `lade.model.select_runner` says which ones can be captured.
        plan: how it takes its masks.
        generation_config: see `EagerRunner`.
        workspace: holds the buffers and what is captured on them.
    """

    sizes = STEP_SIZES
    """Tokens a row that passes are padded to: what lies between costs as much."""

    def __init__(
        self, model: PreTrainedModel, plan: MaskPlan, generation_config: GenerationConfig, workspace: Workspace
    ) -> None:
        super().__init__(model, plan, generation_config)
        self._workspace = workspace

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> GraphCache:
        """See `EagerRunner.new_cache`; static, unless captures of this model fail."""

        def begin() -> StaticCache | TreeCache:
            if self._workspace.trouble is not None:
                return TreeCache()
            return self._static_cache(tokens, limit)

        return GraphCache(begin)

    def eager(self) -> EagerRunner:
        """A runner of the same model that captures nothing."""
        return EagerRunner(self.model, self.plan, self.generation_config)

    def host(self, cache: TreeCache, tokens: int) -> StaticCache:
        """A static cache that takes over the rows of another one, which is emptied.

        Args:
            cache: the other one.
            tokens: greatest length that a row is going to have.

        Raises:
            torch.OutOfMemoryError: there is no memory for it; likewise a `forward` that works on it.
        """
        static = self._static_cache(tokens)
        static.join([cache], [(0, row) for row in range(len(cache.lengths))])
        return static

    def _static_cache(self, tokens: int | None, limit: int | None = None) -> StaticCache:
        return self._workspace.cache(lambda: setup_of(self.model), tokens, limit)

    @torch.no_grad()
    def prefill(
        self, rows: Sequence[Sequence[int]], cache: TreeCache | GraphCache, watch: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """See `EagerRunner.prefill`; a `GraphCache` is to be empty."""
        if isinstance(cache, TreeCache):
            return super().prefill(rows, cache, watch)
        filled = TreeCache()
        logits = super().prefill(rows, filled, watch)
        cache.adopt(filled)
        return logits

    @torch.no_grad()
    def forward(
        self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache | StaticCache | GraphCache
    ) -> torch.Tensor:
        """See `EagerRunner.forward`; with a static cache the next pass may overwrite the logits."""
        if isinstance(cache, TreeCache):
            return super().forward(trees, rows, cache)
        if isinstance(cache, StaticCache):
            return self._replay(self._prepare(trees, cache), trees)
        turn = cache.attempt(lambda static: self._prepare(trees, static))
        return self.forward(trees, rows, cache.current) if turn is None else self._replay(turn, trees)

    def _prepare(self, trees: Sequence[TokenTree], cache: StaticCache) -> Turn:
        """All that may need memory: room in the cache, and the pass of this shape, captured now if it never was."""
        size = max(map(len, trees))
        cache.make_room(size)
        shape, buffers = cache.shape(size), cache.buffers
        found: Pass | None = buffers.passes.get(shape)
        if found is None:
            inputs = StaticInputs(shape.rows, shape.size, self.device)
            inputs.fill(trees, cache.lengths)  # a capture begins with real calls
            found = buffers.passes[shape] = Pass(inputs, self._record(shape, buffers, inputs))
        return Turn(cache, shape, found)

    def _record(self, shape: Shape, buffers: Buffers, inputs: StaticInputs) -> Recording:
        def call() -> torch.Tensor:
            return self._whole(shape, buffers, inputs)

        return self._workspace.record(buffers, call, [inputs.memory, *buffers.groups])

    def _replay(self, turn: Turn, trees: Sequence[TokenTree]) -> torch.Tensor:
        cache, shape, captured = turn.cache, turn.shape, turn.captured
        size = max(map(len, trees))

        def run() -> torch.Tensor:
            captured.inputs.fill(trees, cache.lengths)
            return captured.recording.replay(lambda: self._whole(shape, cache.buffers, captured.inputs))

        logits = self._timed(run)
        cache.fed(size, shape)
        return logits[: len(trees), :size]

    def _whole(self, shape: Shape, buffers: Buffers, inputs: StaticInputs) -> torch.Tensor:
        """The pass itself: all that a graph holds. Logits `[B, S, V]`."""
        step = inputs.tree_step(shape.keys) if self.plan.compact else inputs.step(shape.keys)
        masks = self.plan.masks(step, self.model.dtype)
        with self._slot_counters.told(step):
            return self._call(step, masks, Frame(buffers, inputs.slots(), shape))
