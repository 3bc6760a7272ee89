"""`GraphRunner`: run a model by replaying captured passes.

    trees ──▶ StaticInputs.fill ──▶ replay ──▶ argmax, entries ──▶ one copy: the only synchronisation of a step
               one copy              one graph per shape (B, S, K): mask, model, cache update, reading of the logits

A shape is captured when it is first needed. Prefill, whose shapes vary, runs eagerly, and so does every pass on a cache
that has fallen back to a dynamic one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import cast

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache

from lade.backends.cuda_graphs.buffers import Buffers, NodeBuffers, Replay, StepShape
from lade.backends.cuda_graphs.fallback_cache import FallbackCache
from lade.backends.cuda_graphs.fused import FusedDecoder, decoder_of, difference
from lade.backends.cuda_graphs.pass_inputs import ClosureAncestry, StaticCacheView, StaticInputs
from lade.backends.cuda_graphs.pool import BufferPool
from lade.backends.cuda_graphs.static_cache import StaticCache, StaticRows
from lade.decoding.loop import PromptLogitsHook
from lade.decoding.readout import Readout, read, reduced, unpacked
from lade.decoding.tree import TokenTree
from lade.model.facts import ModelFacts
from lade.model.inputs import STEP_SIZES, MaskPlan, step_bucket
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner

logger = logging.getLogger(__name__)


class CapturedPass:
    """A pass of one shape on some buffers."""

    replay: Replay  # set once it is captured

    def __init__(self, shape: StepShape, buffers: Buffers, device: torch.device) -> None:
        self.shape, self._memory = shape, buffers.hidden
        self.inputs = StaticInputs(shape.rows, shape.size, device, shape.axes)
        self.nodes = NodeBuffers(buffers.state_groups, buffers.node_memory)
        self.states = torch.empty(0)  # [B, S, H], hidden states that it leaves if its shape asks for them

    def take_states(self, states: torch.Tensor) -> None:
        """Copy hidden states to their fixed address; a part of the pass."""
        if not self.states.numel():
            self.states = self._memory.like(states)
        self.states.copy_(states)


class GraphRunner(EagerRunner):
    """Pads each step to one of a few shapes, and replays the captured pass of that shape.

    The model is one that `capture_refusal` does not refuse, and the pool its own. With `fuses`, passes are fused where
    that is possible; see `EagerRunner` for the rest.
    """

    sizing = StaticCache

    def __init__(
        self,
        model: PreTrainedModel,
        plan: MaskPlan,
        generation_config: GenerationConfig,
        pool: BufferPool,
        facts: ModelFacts | None = None,
        *,
        fuses: bool = True,
    ) -> None:
        super().__init__(model, plan, generation_config, facts)
        self._pool = pool
        self._fused = decoder_of(self.facts, plan, in_use=pool.in_use) if fuses else None
        if self._fused is not None and pool.fusion_failed_in == pool.setup:
            self._fused = None
        self._watcher: Callable[[torch.Tensor], None] | None = None
        self._least_step = 1 if self._recurrence is None else 2  # models update their states themselves for one token
        self.step_sizes = [size for size in STEP_SIZES if size >= self._least_step]

    def eager(self) -> EagerRunner:
        """See `EagerRunner.eager`."""
        return EagerRunner(self.model, self.plan, self.generation_config, self.facts)

    @contextmanager
    def watching_states(self, watcher: Callable[[torch.Tensor], None]) -> Iterator[None]:
        """See `EagerRunner.watching_states`; replayed passes call no hooks, so they leave a copy of their states."""
        self._watcher = watcher
        try:
            with super().watching_states(watcher):
                yield
        finally:
            self._watcher = None

    def new_cache(self, *, tokens: int | None = None, limit: int | None = None) -> FallbackCache:
        """See `EagerRunner.new_cache`; static, unless captures of this model fail."""
        return self._fallback_cache(tokens, limit)

    def borrow(self, given: Cache, tokens: int, *, handed_out: bool) -> FallbackCache:
        """See `EagerRunner.borrow`; `given` is an empty `TreeCache`, as a user's own cache has no fixed addresses."""
        return self._fallback_cache(tokens, None, cast(TreeCache, given) if handed_out else None)

    def _fallback_cache(
        self, tokens: int | None, limit: int | None, handed_out: TreeCache | None = None
    ) -> FallbackCache:
        def make_static() -> StaticCache | None:
            failed = self._pool.capture_failed_in is not None
            return None if failed else StaticCache(tokens, limit=limit, pool=self._pool)

        return FallbackCache(make_static, handed_out)

    def host(self, cache: TreeCache, tokens: int) -> StaticCache:
        """See `EagerRunner.host`; returns a static cache without fallback.

        Raises:
            torch.OutOfMemoryError: there is no memory for it, here or in a later `forward` on it.
        """
        static = StaticCache(tokens, pool=self._pool)
        static.join([cache], [(0, row) for row in range(len(cache.lengths))])
        return static

    def pass_sizes(self, largest: int) -> list[int]:
        """See `EagerRunner.pass_sizes`."""
        return sorted({step_bucket(max(size, self._least_step)) for size in range(1, largest + 1)})

    @torch.no_grad()
    def prefill(  # type: ignore[override]  # each kind of runner has caches of its own kind
        self, rows: Sequence[Sequence[int]], cache: FallbackCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """See `EagerRunner.prefill`; the cache must be empty."""
        filled = TreeCache()
        logits = super().prefill(rows, filled, hook)
        cache.adopt(filled)
        return logits

    @torch.no_grad()
    def forward(  # type: ignore[override]  # as above
        self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: StaticCache | FallbackCache
    ) -> torch.Tensor:
        """See `EagerRunner.forward`; the next pass may overwrite the logits."""
        found = self._replayed(trees, cache, reads=False)
        if found is not None:
            return found
        assert cache.dynamic is not None
        return super().forward(trees, rows, cache.dynamic)

    @property
    def reader(self) -> GraphRunner:
        """See `EagerRunner.reader`: what a step reads of the logits is computed within the captured pass."""
        return self

    @torch.no_grad()
    def readouts(
        self,
        trees: Sequence[TokenTree],
        rows: Sequence[Sequence[int]],
        cache: StaticCache | FallbackCache,
        *,
        wants_entries: bool,
    ) -> list[Readout]:
        """See `lade.decoding.loop.Reader.readouts`."""
        found = self._replayed(trees, cache, reads=True)  # [B, S, 1 + WIDTH]
        if found is None:
            assert cache.dynamic is not None
            readout = read(super().forward(trees, rows, cache.dynamic), wants_entries=wants_entries)
        else:
            readout = unpacked(found.flatten(0, 1))
        size = max(map(len, trees))
        return [readout.rows(row * size, len(tree)) for row, tree in enumerate(trees)]

    def _replayed(
        self, trees: Sequence[TokenTree], cache: StaticCache | FallbackCache, *, reads: bool
    ) -> torch.Tensor | None:
        """Return what a captured pass returns, `[B, S, ...]`; None if `cache.dynamic` has the rows instead."""
        prepared = cache.try_static(lambda static: self._prepare(trees, static, reads=reads))
        return None if prepared is None else self._replay(trees, *prepared)

    def _prepare(
        self, trees: Sequence[TokenTree], cache: StaticCache, *, reads: bool
    ) -> tuple[StaticRows, CapturedPass]:
        """Do everything that may need memory: reserve cache slots, and capture the pass of this shape if it is new."""
        size = max(self._least_step, *map(len, trees))
        cache.make_room(size)
        shape, rows = replace(cache.shape(size), states=self._watcher is not None, reads=reads), cache.rows
        found: CapturedPass | None = rows.buffers.passes.get(shape)
        self.prepared = found is None
        if found is None:
            found = CapturedPass(shape, rows.buffers, self.device)
            found.inputs.fill(trees, rows.lengths, rows.offsets)  # the warm-up calls need valid inputs
            self._record(rows, found)
            rows.buffers.passes[shape] = found
        return rows, found

    def _record(self, rows: StaticRows, captured: CapturedPass) -> None:
        if self._fused is not None:
            self._try_fused(self._fused, rows, captured)
        fixed = [captured.inputs.memory, *rows.buffers.fixed]
        captured.replay = self._pool.record(rows.buffers, lambda: self._static_pass(rows, captured), fixed)

    def _replay(self, trees: Sequence[TokenTree], rows: StaticRows, captured: CapturedPass) -> torch.Tensor:
        size = max(map(len, trees))
        self._stopwatch.start(self.device)
        captured.inputs.fill(trees, rows.lengths, rows.offsets)
        logits = captured.replay(lambda: self._static_pass(rows, captured))
        self._stopwatch.stop(logits.device)
        rows.fed(size, captured.shape, None if self._recurrence is None else captured.nodes)
        if self._watcher is not None:
            self._watcher(captured.states[: len(trees), :size].clone())  # the next replay overwrites them
        return logits[: len(trees), :size]

    def _try_fused(self, fused: FusedDecoder, rows: StaticRows, captured: CapturedPass) -> None:
        """Compare a fused pass with the model's own; fuse none from now on if they differ."""
        inputs = captured.inputs
        real = inputs.closure.diagonal(dim1=1, dim2=2)  # [B, S]; padding does not see itself
        own = self._model_pass(rows, captured)
        try:
            found = fused.logits(fused.states(inputs, rows.buffers, captured.shape))
            problem = difference(found[real], own[real], exact=fused.exact)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises; the model's own pass replaces it
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if problem:
            self._fused, self._pool.fusion_failed_in = None, self._pool.setup
            logger.warning("passes of %s are not fused, which is slower: %s", type(self.model).__name__, problem)

    def _static_pass(self, rows: StaticRows, captured: CapturedPass) -> torch.Tensor:
        """Run the pass that a graph captures, which leaves what `captured` has of it.

        Returns:
            Logits `[B, S, V]`, or what is read of them, `[B, S, 1 + WIDTH]` int32.
        """
        if self._fused is None:
            logits = self._model_pass(rows, captured)
        else:
            states = self._fused.states(captured.inputs, rows.buffers, captured.shape)
            if captured.shape.states:
                captured.take_states(states)
            logits = self._fused.logits(states)
        if not captured.shape.reads:
            return logits
        found: torch.Tensor = reduced(logits.flatten(0, 1), wants_entries=True).unflatten(0, logits.shape[:2])
        return found

    def _model_pass(self, rows: StaticRows, captured: CapturedPass) -> torch.Tensor:
        """Run the model; return logits `[B, S, V]`."""
        inputs, shape = captured.inputs, captured.shape
        step = inputs.tree_step(shape.keys) if self.plan.compact else inputs.step(shape.keys)
        view = StaticCacheView(rows.layers, rows.buffers, inputs.slots(), shape)
        arguments = self._arguments(step, view, inputs.offsets)
        with ExitStack() as stack:
            if shape.states:
                stack.enter_context(super().watching_states(captured.take_states))
            if self._slot_patches:
                stack.enter_context(self._slot_patches.patched_for(step))
            if self._recurrence is not None:
                ancestry = ClosureAncestry(inputs.closure)
                view.begin(ancestry)
                stack.enter_context(self._recurrence.patched_for(ancestry))
            logits: torch.Tensor = self.model(**arguments).logits
        captured.nodes.take(view.recurrent)
        return logits
