"""The backend of decoding by several processes, and its refusals of models split over processes.

With tensor parallelism each process has a part of every matrix and of the heads, so all processes run a forward pass
together and exchange partial results within it. The logits are complete, and equal in all of them.

With sharded weights each process decodes texts of its own and gathers each layer's weights from all. So all of them
must run the same number of passes, which transformers' loops ensure (`synced_gpus`). With trees, no other process knows
how many passes a text takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from lade.backends.processes import team
from lade.backends.processes.leader import LeadingRunner, generator_states, packed
from lade.backends.processes.lookahead_parallel import LeadingPartRunner
from lade.errors import UnsupportedArgumentError
from lade.model.config import Positions, field
from lade.model.facts import ModelFacts, needs_synced_passes, tensor_parallel_size
from lade.model.inputs import MaskPlan
from lade.model.prepared import argument_of
from lade.model.runner import TEAM_RUNNERS, EagerRunner
from lade.model.supports import SPLIT_MODELS

SHARED = "a model that several processes decode"
_KEYS = ("k_proj", "qkv_proj", "query_key_value")


def split_refusal(facts: ModelFacts, config: PretrainedConfig) -> str:
    """Return why a model split by tensor parallelism cannot be served; empty if it can be, or is not split."""
    model = facts.model
    size = tensor_parallel_size(model)
    if size == 1:
        return ""
    split = f"its layers are split over {size} processes (tensor parallelism)"
    heads = field(config, "num_key_value_heads") or field(config, "num_attention_heads")
    if isinstance(heads, int) and heads % size and _splits_keys(model):
        return f"{split}, and its {heads} KV heads cannot be divided evenly: use another number"
    if mesh := [name for name in ("_fsdp_size", "_dp_size") if (getattr(model, name, None) or 1) > 1]:
        return f"{split}, and in another way as well ({mesh[0]}): use one of them"
    for met, what in (
        (model.config.is_encoder_decoder, "it has an encoder"),
        (facts.recurrent, "its recurrent layers have states in each process"),
        (Positions.of(config).longrope_switch is not None, "it recomputes its text at some length"),
        (facts.training, "it is in training mode"),
    ):
        if met:
            return f"{split}, and {what}, which is not supported: load it with device_map"
    return ""


def sharding_refusal(model: Any) -> str:
    """Return why a model with sharded weights cannot be served; an empty string if weights are not sharded."""
    if not needs_synced_passes(model):
        return ""
    many = f"its weights are sharded over {dist.get_world_size()} processes (FSDP, ZeRO-3)"
    return f"{many}, which must run equal numbers of passes: load it with tp_plan, or unsharded in each of them"


def _splits_keys(model: Any) -> bool:
    plan = getattr(model, "_tp_plan", None) or {}
    return any(name.rpartition(".")[2] in _KEYS and style == "colwise" for name, style in plan.items())


class ProcessesBackend:
    """Several processes that decode one model: tensor parallelism and `lade.parallel`, see `lade.model.registry`."""

    has_team = staticmethod(team.has_team)
    has_parts = staticmethod(team.has_parts)

    def leads(self, model: Any) -> bool:
        """Return True while this process makes a call that others follow."""
        return isinstance(model, PreTrainedModel) and team.leader_of(model) is not None

    @contextmanager
    def decoding_plainly(self, model: Any, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Send the arguments to a model's other processes, which decode plainly while the context lasts.

        Raises:
            UnsupportedArgumentError: the arguments cannot be sent, or limit the time.
        """
        leader = team.leader_of(model) if self._has_others_decode_plainly(model) else None
        if leader is None:
            yield
            return
        remedy = "leave it out, or give arguments that lookahead decoding serves"
        if argument_of(model, arguments, "max_time") is not None:
            raise UnsupportedArgumentError(f"max_time cannot be used with plain decoding of {SHARED}", remedy)
        try:
            sent = packed(dict(arguments))
        except Exception as problem:
            reason = f"arguments that cannot be pickled ({problem}) cannot be used with plain decoding of {SHARED}"
            raise UnsupportedArgumentError(reason, remedy) from problem
        with leader.announced("plain", sent, generator_states(model.device)):
            yield

    def refuse_plain_steps(self, model: Any) -> None:
        """Raise `UnsupportedArgumentError` for streamed plain decoding, which cannot be stopped in all processes."""
        if self._has_others_decode_plainly(model):
            raise UnsupportedArgumentError(
                f"lade.stream decodes plainly here, and cannot do so with {SHARED}", "call lade.generate"
            )

    def _has_others_decode_plainly(self, model: Any) -> bool:
        """Return True if others follow plain decoding; with a whole model of its own this process decodes alone."""
        return self.leads(model) and not team.has_parts(model)

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
            UnsupportedArgumentError: each process feeds a part of every tree, but the caller needs whole passes; or
                the layers are split, and the other processes take no part in this call.
        """
        model = facts.model
        leader = team.leader_of(model)
        if leader is None:
            if tensor_parallel_size(model) > 1:
                raise UnsupportedArgumentError(
                    f"custom_generate=lade.decode cannot be used with {SHARED}",
                    "call lade.generate, or lade.enable(model)",
                )
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
TEAM_RUNNERS.fill(BACKEND)
SPLIT_MODELS.fill(BACKEND)
