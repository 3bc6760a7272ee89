"""The backend of decoding by several processes."""

from __future__ import annotations

from transformers import GenerationConfig, PretrainedConfig

from lade.backends.processes import channel, team
from lade.backends.processes.follower import DismissedError
from lade.backends.processes.leader import LeadingRunner
from lade.backends.processes.lookahead_parallel import LeadingPartRunner
from lade.backends.processes.tensor_parallel import sharding_refusal, split_refusal
from lade.errors import UnsupportedArgumentError
from lade.model.backend import Backend
from lade.model.facts import ModelFacts
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner


class ProcessesBackend(Backend):
    """Several processes that decode one model: tensor parallelism and `lade.parallel`, see `lade.model.joint`."""

    DismissedError = DismissedError
    follow_call = staticmethod(team.follow_call)
    generator_states = staticmethod(channel.generator_states)
    has_parts = staticmethod(team.has_parts)
    is_connected = staticmethod(channel.is_connected)
    leader_of = staticmethod(team.leader_of)
    led_by_this_process = staticmethod(team.led_by_this_process)
    packed = staticmethod(channel.packed)
    steps_together = staticmethod(team.steps_together)
    team_of = staticmethod(team.team_of)
    together = staticmethod(team.together)

    def refusal(self, facts: ModelFacts, config: PretrainedConfig) -> str:
        """Return why a split or sharded model cannot be served; an empty string if it can be."""
        return split_refusal(facts, config) or sharding_refusal(facts.model)

    def runner(
        self,
        facts: ModelFacts,
        plan: MaskPlan,
        generation_config: GenerationConfig,
        *,
        own_cache: bool,
        captures: bool,
    ) -> EagerRunner | None:
        """Return a runner whose passes run in all processes; None for a model that this process decodes alone.

        Raises:
            UnsupportedArgumentError: each process feeds a part of every tree, but the caller needs whole passes.
        """
        model = facts.model
        leader = team.leader_of(model)
        if leader is None:
            return None
        if not team.has_parts(model):
            return LeadingRunner(model, plan, generation_config, leader, facts)
        if not captures:
            raise UnsupportedArgumentError(
                "num_beams, and processors or streamers of a whole batch, cannot be used with lade.parallel",
                "leave them out, or split the model over the processes (tp_plan)",
            )
        return LeadingPartRunner(model, plan, generation_config, leader, facts)


BACKEND = ProcessesBackend()
