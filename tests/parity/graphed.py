"""Models served by captured passes: on the CPU a tape stands in for CUDA graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from inside import buffers_in
from tape import Counted, Counts, Tape
from transformers import GenerationConfig, PreTrainedModel

import lade
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.backends.cuda_graphs.buffers import CudaCapture
from lade.backends.cuda_graphs.pool import BufferPool, new_pool
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.hf import job
from lade.model.facts import ModelFacts
from lade.model.runner import EagerRunner


class Graphs:
    """Has every model of a test served by a `GraphRunner`, and counts what that does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[PreTrainedModel, BufferPool] = {}
        self.counted: Any = None

    def runner_for(
        self,
        facts: ModelFacts,
        plan: Any,
        generation_config: GenerationConfig,
        *,
        own_cache: bool = True,
        captures: bool = True,
    ) -> EagerRunner:
        model = facts.model
        if not own_cache or not captures or capture_refusal(model, facts):
            return EagerRunner(model, plan, generation_config, facts)
        return GraphRunner(model, plan, generation_config, self.pool(model), facts)

    def serve(self, monkeypatch: pytest.MonkeyPatch) -> Graphs:
        """Have all passes from now on made by these runners."""
        monkeypatch.setattr(job, "runner_for", self.runner_for)
        return self

    def pool(self, model: PreTrainedModel) -> BufferPool:
        if model not in self._pools:
            make = Tape if self.device.type == "cpu" else lambda: CudaCapture(self.device)
            self.counted = counted = Counts()
            self._pools[model] = new_pool(model, lambda: Counted(make(), counted))
        return self._pools[model]

    def runner(self, model: PreTrainedModel) -> GraphRunner:
        plan = lade.supports(model).plan
        assert plan is not None
        return GraphRunner(model, plan, GenerationConfig(), self.pool(model))


def shapes_of(pool: BufferPool) -> Counter[tuple[int, int, int]]:
    passes = [shape for entry in buffers_in(pool) for shape in entry.buffers.passes]
    return Counter((shape.rows, shape.size, shape.keys) for shape in passes)
