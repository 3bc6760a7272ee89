"""Models split over processes by tensor parallelism, FSDP or ZeRO-3.

By tensor parallelism each process has a part of every matrix and of the heads, so that a forward pass is one of all
processes together: they exchange partial results within it. The logits are whole, and the same, in each of them.

Where weights are sharded each process decodes texts of its own, and gathers each layer's weights from all. So all have
to make as many passes, for which transformers' loops see to it (`synced_gpus`). How many passes a text takes by trees
no other process knows.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from transformers import PretrainedConfig

from lade.model.config import Positions, field
from lade.model.facts import ModelFacts, needs_synced_passes, tensor_parallel_size

_KEYS = ("k_proj", "qkv_proj", "query_key_value")


def why_not_split(facts: ModelFacts, config: PretrainedConfig) -> str:
    """Why a model whose layers are split over processes cannot be served; empty if it can be, or is not split.

    Args:
        facts: of the model.
        config: of the layers that write the text.
    """
    model = facts.model
    size = tensor_parallel_size(model)
    if size == 1:
        return ""
    split = f"its layers are split over {size} processes (tensor parallelism)"
    heads = field(config, "num_key_value_heads") or field(config, "num_attention_heads")
    if isinstance(heads, int) and heads % size and _splits_keys(model):
        return f"{split}, and its {heads} heads of keys and values cannot be shared out evenly: use a number that can"
    if mesh := [name for name in ("_fsdp_size", "_dp_size") if (getattr(model, name, None) or 1) > 1]:
        return f"{split}, and in another way, too ({mesh[0]}): split it in one"
    for met, what in (
        (model.config.is_encoder_decoder, "it has an encoder"),
        (facts.recurrent, "its recurrent layers have states in each of them"),
        (Positions.of(config).longrope_switch is not None, "at some length it computes its text again"),
        (facts.training, "it is in training mode"),
    ):
        if met:
            return f"{split}, and {what}, which is not served there: load it with device_map"
    return ""


def why_not_in_step(model: Any) -> str:
    """Why a model whose weights are sharded cannot be served; empty if they are not."""
    if not needs_synced_passes(model):
        return ""
    many = f"its weights are sharded over {dist.get_world_size()} processes (FSDP, ZeRO-3)"
    return f"{many}, which have to make as many passes: load it with tp_plan, or whole in each of them"


def _splits_keys(model: Any) -> bool:
    plan = getattr(model, "_tp_plan", None) or {}
    return any(name.rpartition(".")[2] in _KEYS and style == "colwise" for name, style in plan.items())
