"""Select the runner of a generation: captured, eager, or one that leads other processes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from lade.backends.cuda_graphs.pool import free_idle_buffers, pool_of
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.backends.processes.leader import LeadingRunner
from lade.backends.processes.lookahead_parallel import LeadingPartRunner
from lade.backends.processes.team import has_parts, leader_of
from lade.backends.processes.tensor_parallel import tensor_parallel_size
from lade.backends.recurrent.cores import CorePatches
from lade.errors import UnsupportedArgumentError
from lade.model.capture_blockers import attached
from lade.model.facts import ModelFacts
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner, input_device
from lade.model.support.supports import unwrap


def local_runner_for(
    model: PreTrainedModel,
    plan: MaskPlan,
    generation_config: GenerationConfig,
    *,
    own_cache: bool = True,
    facts: ModelFacts | None = None,
) -> EagerRunner:
    """A `GraphRunner` where passes can be captured, and an `EagerRunner` elsewhere, always on a CPU.

    Args:
        model: a decoder-only model that `lade.supports`.
        plan: how the model takes its masks.
        generation_config: see `EagerRunner`.
        own_cache: whether the cache is ours to make; a user's own has no fixed addresses.
        facts: of the model, where the call has looked at it already.
    """
    device = input_device(model)
    if device.type != "cuda" or not own_cache or why_eager(model, facts):
        return EagerRunner(model, plan, generation_config, facts)
    pool = pool_of(model, device)
    if pool.capture_failed_in is not None:  # there has been a warning
        return EagerRunner(model, plan, generation_config, facts)
    return GraphRunner(model, plan, generation_config, pool, facts)


def why_eager(model: Any, facts: ModelFacts | None = None) -> str:
    """What a graph would miss of this model's passes, on any device; empty if nothing is known."""
    facts = ModelFacts.of(model) if facts is None else facts
    positions = facts.positions
    if positions.longrope_switch is not None or positions.dynamic is not None:
        return "its rotary frequencies depend on the longest position, which the host reads"
    if facts.indexers:
        return "its indexers pick among the keys of a text, whose number the host reads"
    if CorePatches(facts).forgets:
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
    return attached(facts)


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


def runner_for(
    model: PreTrainedModel,
    plan: MaskPlan,
    generation_config: GenerationConfig,
    *,
    own_cache: bool = True,
    facts: ModelFacts | None = None,
) -> EagerRunner:
    """See `lade.backends.runners.local_runner_for`; passes of several processes are not captured."""
    leader = leader_of(model)
    if leader is None:
        return local_runner_for(model, plan, generation_config, own_cache=own_cache, facts=facts)
    if has_parts(model):
        return LeadingPartRunner(model, plan, generation_config, leader, facts)
    return eager_runner_for(model, plan, generation_config, facts)


def reader_of(runner: EagerRunner) -> LeadingPartRunner | None:
    """See `lade.decoding.loop.DecodeLoop.reader`: where all logits are in one process, they are read there."""
    return runner if isinstance(runner, LeadingPartRunner) else None


def eager_runner_for(
    model: PreTrainedModel, plan: MaskPlan, generation_config: GenerationConfig, facts: ModelFacts | None = None
) -> EagerRunner:
    """One that captures nothing."""
    leader = leader_of(model)
    if leader is None:
        return EagerRunner(model, plan, generation_config, facts)
    if has_parts(model):
        raise UnsupportedArgumentError(
            "num_beams, or processors and streamers that see a whole batch, cannot be used with lade.parallel",
            "leave them out, or split the model over the processes (tp_plan)",
        )
    return LeadingRunner(model, plan, generation_config, leader, facts)
