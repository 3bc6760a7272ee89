"""Which runner a generation has: one that leads other processes, or one of this process alone."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel

from lade.cluster.leader import LeadingRunner
from lade.cluster.parts import LeadingPartRunner
from lade.cluster.team import has_parts, leader_of
from lade.errors import UnsupportedArgumentError
from lade.model import select_runner
from lade.model.facts import ModelFacts
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner


def runner_for(
    model: PreTrainedModel,
    plan: MaskPlan,
    generation_config: GenerationConfig,
    *,
    own_cache: bool = True,
    facts: ModelFacts | None = None,
) -> EagerRunner:
    """See `lade.model.select_runner.runner_for`; passes of several processes are not captured."""
    leader = leader_of(model)
    if leader is None:
        return select_runner.runner_for(model, plan, generation_config, own_cache=own_cache, facts=facts)
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
