"""Models served by captured passes: on the CPU a tape stands in for CUDA graphs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from inside import buffers_in
from tape import Counted, Counts, Tape
from transformers import GenerationConfig, PreTrainedModel

import lade
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.backends.cuda_graphs.buffers import Capture, CudaCapture
from lade.backends.cuda_graphs.pool import BufferPool, new_pool
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.errors import CaptureWarning
from lade.hf import job
from lade.model.facts import ModelFacts
from lade.model.runner import EagerRunner


class Graphs:
    """Has every model of a test served by a `GraphRunner`, and counts what that does."""

    def __init__(self, device: torch.device, capture: Callable[[], Capture] = Tape) -> None:
        self.device = device
        self.captures = True  # set to False to have passes made one by one
        self._capture = capture if device.type == "cpu" else lambda: CudaCapture(device)
        self._pools: dict[PreTrainedModel, BufferPool] = {}
        self.counted: Any = None

    def runner_for(
        self, facts: ModelFacts, plan: Any, config: GenerationConfig, *, own_cache: bool = True, captures: bool = True
    ) -> EagerRunner:
        model = facts.model
        if not own_cache or not captures or not self.captures or capture_refusal(model, facts):
            return EagerRunner(model, plan, config, facts)
        return GraphRunner(model, plan, config, self.pool(model), facts)

    def serve(self, monkeypatch: pytest.MonkeyPatch) -> Graphs:
        """Have all passes from now on made by these runners."""
        monkeypatch.setattr(job, "runner_for", self.runner_for)
        return self

    def pool(self, model: PreTrainedModel) -> BufferPool:
        if model not in self._pools:
            self.counted = counted = Counts()
            self._pools[model] = new_pool(model, lambda: Counted(self._capture(), counted))
        return self._pools[model]

    def forget(self) -> None:
        """Hold no pool any more, and so no model."""
        self._pools.clear()

    def runner(self, model: PreTrainedModel) -> GraphRunner:
        plan = lade.supports(model).plan
        assert plan is not None
        return GraphRunner(model, plan, GenerationConfig(), self.pool(model))


@contextmanager
def graphs_on(
    device: torch.device | str, patch: pytest.MonkeyPatch, capture: Callable[[], Capture] = Tape
) -> Iterator[Graphs]:
    """Serve every model; that something cannot be captured is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        yield Graphs(torch.device(device), capture).serve(patch)


def assert_same_parts(cache: Any, expected: Any) -> None:
    """Assert that a cache that was handed out holds what plain decoding's holds."""
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.keys[:, :, : layer.get_seq_length()], other.keys)
        torch.testing.assert_close(layer.values[:, :, : layer.get_seq_length()], other.values)


def shapes_of(pool: BufferPool) -> Counter[tuple[int, int, int]]:
    passes = [shape for entry in buffers_in(pool) for shape in entry.buffers.passes]
    return Counter((shape.rows, shape.size, shape.keys) for shape in passes)
