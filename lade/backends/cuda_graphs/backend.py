"""The CUDA graph backend: passes that it can capture, and the release of their memory."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.backends.cpu.invariant_marker import ON_GPU
from lade.backends.cuda_graphs.fused import fusion_refusal
from lade.backends.cuda_graphs.pool import free_idle_buffers, pool_of
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.model.capture_blockers import capture_blocker
from lade.model.facts import ModelFacts, tensor_parallel_size
from lade.model.inputs import MaskPlan
from lade.model.runner import CAPTURED_RUNNERS, EagerRunner, input_device
from lade.model.supports import FUSION, unwrap


def capture_refusal(model: Any, facts: ModelFacts | None = None) -> str:
    """Return why passes of a model cannot be captured, on any device; an empty string if no reason is known."""
    facts = ModelFacts.of(model) if facts is None else facts
    positions = facts.positions
    if positions.longrope_switch is not None or positions.dynamic is not None:
        return "its rotary frequencies depend on the longest position, which is read on the host"
    if facts.indexers:
        return "its indexers pick among a number of keys that is read on the host"
    if facts.recurrence is not None and facts.recurrence.forgets:
        return "its recurrent layers process a tree depth by depth, and its depth is read on the host"
    if tensor_parallel_size(model) > 1:
        return "its layers are split over processes, which exchange results within a pass"
    if len({tensor.device for tensor in (*facts.weights, *model.buffers())}) > 1:
        return "its weights are on several devices"
    device = input_device(model)
    if torch.is_autocast_enabled(device.type):
        return "autocast chooses dtypes call by call"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the caller is capturing a graph"
    return capture_blocker(facts)


def release(model: Any) -> None:
    """Free the memory that captured passes of a model hold on its CUDA device.

    That is one KV cache and the graphs captured on it. Both are kept after a generation for the next one, and freed
    with the model; after `release` the next generation allocates and captures again. Buffers in use by a generation or
    a `lade.Engine` are not freed; call this again when it has ended. A no-op if nothing was captured, as on a CPU.

    >>> lade.generate(model, **inputs)
    >>> lade.release(model)

    Args:
        model: a transformers causal language model, or one wrapped by PEFT; a no-op for anything else.
    """
    inner = unwrap(model)
    if isinstance(inner, PreTrainedModel) and free_idle_buffers(inner) and input_device(inner).type == "cuda":
        torch.cuda.empty_cache()  # returns the graphs' private memory pool


class GraphBackend:
    """Forward passes captured as CUDA graphs, see `lade.model.registry`."""

    def fusion_refusal(self, facts: ModelFacts, plan: MaskPlan) -> str:
        """Return why captured passes of a model on a CUDA device are not fused; empty if they are."""
        return capture_refusal(facts.model, facts) or fusion_refusal(facts, plan)

    def invariant_refusal(self, model: Any) -> str:
        """Return why `lade.invariant` does not even try a model on a GPU; an empty string if it does."""
        from lade.backends.cuda_graphs.invariant.make_invariant import refusal

        return refusal(model) or capture_refusal(model)

    def make_invariant(self, model: Any) -> str:
        """Make a model on a GPU invariant, in place; return why it is unchanged, an empty string if it is invariant."""
        from lade.backends.cuda_graphs.invariant.make_invariant import make_invariant

        return make_invariant(model, pool_of(model, input_device(model)))

    def runner(
        self,
        facts: ModelFacts,
        plan: MaskPlan,
        generation_config: GenerationConfig,
        *,
        own_cache: bool,
        captures: bool,
    ) -> EagerRunner | None:
        """Return a `GraphRunner` if the model's passes can be captured; None otherwise."""
        model = facts.model
        device = input_device(model)
        if device.type != "cuda" or not own_cache or capture_refusal(model, facts):
            return None
        pool = pool_of(model, device)
        if pool.capture_failed_in is not None:  # a warning was issued
            return None
        return GraphRunner(model, plan, generation_config, pool, facts)


BACKEND = GraphBackend()
CAPTURED_RUNNERS.fill(BACKEND)
FUSION.fill(BACKEND)
ON_GPU.fill(BACKEND)
