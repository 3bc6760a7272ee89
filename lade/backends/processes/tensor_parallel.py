"""Refusals of models split over processes by tensor parallelism, FSDP or ZeRO-3.

With tensor parallelism each process has a part of every matrix and of the heads, so all processes run a forward pass
together and exchange partial results within it. The logits are complete, and equal in all of them.

With sharded weights each process decodes texts of its own and gathers each layer's weights from all. So all of them
must run the same number of passes, which transformers' loops ensure (`synced_gpus`). With trees, no other process knows
how many passes a text takes.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from transformers import PretrainedConfig

from lade.model.config import Positions, field
from lade.model.facts import ModelFacts, in_step, tensor_parallel_size

_KEYS = ("k_proj", "qkv_proj", "query_key_value")


def split_refusal(facts: ModelFacts, config: PretrainedConfig) -> str:
    """Return why a model split by tensor parallelism cannot be served; an empty string if it can be, or is not split.

    Args:
        facts: survey of the model.
        config: configuration of its decoder.
    """
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
    if not in_step(model):
        return ""
    many = f"its weights are sharded over {dist.get_world_size()} processes (FSDP, ZeRO-3)"
    return f"{many}, which must run equal numbers of passes: load it with tp_plan, or unsharded in each of them"


def _splits_keys(model: Any) -> bool:
    plan = getattr(model, "_tp_plan", None) or {}
    return any(name.rpartition(".")[2] in _KEYS and style == "colwise" for name, style in plan.items())
