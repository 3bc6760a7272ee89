"""The CUDA graph backend's public object, which passes it can capture, and how their memory is given back."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.backends.cuda_graphs.pool import free_idle_buffers, pool_of
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.model.backend import Backend
from lade.model.capture_blockers import capture_blocker
from lade.model.facts import ModelFacts, tensor_parallel_size
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner, input_device
from lade.model.support.supports import unwrap


def why_eager(model: Any, facts: ModelFacts | None = None) -> str:
    """What a graph would miss of this model's passes, on any device; empty if nothing is known."""
    facts = ModelFacts.of(model) if facts is None else facts
    positions = facts.positions
    if positions.longrope_switch is not None or positions.dynamic is not None:
        return "its rotary frequencies depend on the longest position, which the host reads"
    if facts.indexers:
        return "its indexers pick among the keys of a text, whose number the host reads"
    if facts.recurrence is not None and facts.recurrence.forgets:
        return "its recurrent layers go through a tree depth by depth, and the host reads how deep it is"
    if tensor_parallel_size(model) > 1:
        return "its layers are split over processes, which exchange results within a pass"
    if len({tensor.device for tensor in (*facts.weights, *model.buffers())}) > 1:
        return "its weights lie on several devices"
    device = input_device(model)
    if torch.is_autocast_enabled(device.type):
        return "autocast decides about dtypes from call to call"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the caller is capturing a graph"
    return capture_blocker(facts)


def release(model: Any) -> None:
    """Give back the memory that captured passes of a model have taken on its CUDA device.

    That is the keys and values of one cache, and the graphs that were captured on them. They stay when a generation
    ends, for the next one, and are freed with the model; after `release` the next generation allocates and captures
    them again. What a generation or a `lade.Engine` is using stays until that has ended; call again then. A no-op
    where nothing was captured, as on a CPU.

    >>> lade.generate(model, **inputs)
    >>> lade.release(model)

    Args:
        model: a transformers causal language model, or one wrapped by PEFT. Of anything else nothing is freed.
    """
    inner = unwrap(model)
    if isinstance(inner, PreTrainedModel) and free_idle_buffers(inner) and input_device(inner).type == "cuda":
        torch.cuda.empty_cache()  # graphs have a memory pool of their own, which is of no use to others before


class GraphBackend(Backend):
    """Forward passes captured as CUDA graphs; see `lade.model.joint`."""

    release = staticmethod(release)

    def runner(
        self,
        facts: ModelFacts,
        plan: MaskPlan,
        generation_config: GenerationConfig,
        *,
        own_cache: bool,
        captures: bool,
    ) -> EagerRunner | None:
        """Return a `GraphRunner` where the model's passes can be captured; None elsewhere."""
        model = facts.model
        device = input_device(model)
        if device.type != "cuda" or not own_cache or why_eager(model, facts):
            return None
        pool = pool_of(model, device)
        if pool.capture_failed_in is not None:  # there has been a warning
            return None
        return GraphRunner(model, plan, generation_config, pool, facts)


BACKEND = GraphBackend()
