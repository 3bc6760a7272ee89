"""Runs a model by passes that were captured once and are replayed: on a GPU, launching them takes longer than they do.

    trees ──▶ StaticInputs.fill ──▶ replay ──▶ logits [B, S, V] ──▶ read: the one place where a step waits
               one copy              one graph of the shape (B, S, K): mask, model, cache update

A shape is captured when it is first needed. Prefill, whose shapes differ, runs as it always does. So does all that is
asked for with a cache that is not static.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.decoding.engine import Watch
from lade.decoding.tree import TokenTree
from lade.model.attention import MaskPlan
from lade.model.buckets import STEP_SIZES
from lade.model.cache import TreeCache
from lade.model.capture import Recording
from lade.model.runner import EagerRunner
from lade.model.static_buffers import Buffers, Frame, Shape
from lade.model.static_cache import StaticCache
from lade.model.static_inputs import StaticInputs
from lade.model.workspace import Workspace, setup_of


@dataclass(frozen=True)
class Pass:
    """One captured pass, and what it reads."""

    inputs: StaticInputs
    recording: Recording


class GraphRunner(EagerRunner):
    """Pads each step to one of a few shapes, and replays what was captured of it.

    Args:
        model: see `EagerRunner`; `lade.model.choice` says which ones can be captured.
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
        self._setup = setup_of(model)

    def new_cache(self, tokens: int) -> StaticCache:
        """An empty cache for rows of at most so many tokens."""
        return self._workspace.cache(tokens, self._setup)

    def host(self, cache: TreeCache, tokens: int) -> StaticCache:
        """A static cache that takes over the rows of another one, which is emptied."""
        static = self.new_cache(tokens)
        static.join([cache], [(0, row) for row in range(len(cache.lengths))])
        return static

    @torch.no_grad()
    def prefill(
        self, rows: Sequence[Sequence[int]], cache: TreeCache | StaticCache, watch: Watch | None = None
    ) -> torch.Tensor:
        """See `EagerRunner.prefill`; a static cache is to be empty."""
        if not isinstance(cache, StaticCache):
            return super().prefill(rows, cache, watch)
        filled = TreeCache()
        logits = super().prefill(rows, filled, watch)
        cache.join([filled], [(0, row) for row in range(len(rows))])
        return logits

    @torch.no_grad()
    def forward(
        self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: TreeCache | StaticCache
    ) -> torch.Tensor:
        """See `EagerRunner.forward`; with a static cache the next pass may overwrite the logits."""
        if not isinstance(cache, StaticCache):
            return super().forward(trees, rows, cache)
        size = max(map(len, trees))
        cache.reserve(size)
        shape = cache.shape(size)
        pass_ = self._pass(shape, cache.buffers, trees, cache.lengths)

        def run() -> torch.Tensor:
            pass_.inputs.fill(trees, cache.lengths)
            return pass_.recording.replay(lambda: self._whole(shape, cache.buffers, pass_.inputs))

        logits = self._timed(run)
        cache.fed(size, shape)
        return logits[: len(trees), :size]

    def _pass(self, shape: Shape, buffers: Buffers, trees: Sequence[TokenTree], lengths: Sequence[int]) -> Pass:
        """The pass of a shape on these buffers, captured now if it never was."""
        found: Pass | None = buffers.passes.get(shape)
        if found is None:
            inputs = StaticInputs(shape.rows, shape.size, self.device)
            inputs.fill(trees, lengths)  # a capture begins with real calls
            found = buffers.passes[shape] = Pass(inputs, self._record(shape, buffers, inputs))
        return found

    def _record(self, shape: Shape, buffers: Buffers, inputs: StaticInputs) -> Recording:
        def call() -> torch.Tensor:
            return self._whole(shape, buffers, inputs)

        return self._workspace.record(buffers, call, [inputs.memory, *buffers.groups], self._setup)

    def _whole(self, shape: Shape, buffers: Buffers, inputs: StaticInputs) -> torch.Tensor:
        """The pass itself: all that a graph holds. Logits `[B, S, V]`."""
        step = inputs.tree_step(shape.keys) if self.plan.compact else inputs.step(shape.keys)
        masks = self.plan.masks(step, self.model.dtype)
        with self._slot_counters.told(step):
            return self._call(step, masks, Frame(buffers, inputs.slots(), shape))
