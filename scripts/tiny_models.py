"""A tiny model of any class that transformers has a configuration for, with random weights, by names of fields."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 64
WINDOW = 8
LAYERS = 4

_FIELDS = [
    (VOCABULARY, "vocab_size vocab_size_per_layer_input text_vocab_size decoder_vocab_size"),
    (32, "hidden_size_per_layer_input moe_intermediate_size moe_latent_size expert_ffn_hidden_size"),
    (
        64,
        "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim emb_dim intermediate_size",
    ),
    (
        64,
        "shared_experts_intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim d_ff dff lru_width",
    ),
    (64, "shared_intermediate_size ffn_hidden_size vision_output_dim"),
    (
        64,
        "shared_expert_intermediate_size intermediate_size_mlp attention_hidden_size input_embedding_size",
    ),
    (
        64,
        "output_embedding_size projection_dim out_hidden_size projector_input_dim projector_output_dim",
    ),
    (
        64,
        "dense_intermediate_size moe_shared_expert_intermediate_size ",
    ),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers depth num_decoder_layers"),
    (LAYERS, "num_encoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads"),
    (LAYERS, "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads"),
    (4, "num_experts n_routed_experts num_local_experts moe_num_experts index_topk patch_size linear_num_value_heads"),
    (4, "mamba_d_conv n_mamba_heads"),
    (2, "num_key_value_heads num_kv_heads num_global_key_value_heads swa_num_key_value_heads num_experts_per_tok"),
    (
        2,
        "num_experts_per_token moe_topk index_n_heads linear_num_key_heads moe_k temporal_patch_size",
    ),
    (2, "spatial_merge_size"),
    (
        1,
        "n_group topk_group num_expert_group first_k_dense_replace n_shared_experts num_dense_layers",
    ),
    (1, "num_shared_experts num_nextn_predict_layers mamba_n_groups n_groups"),
    (16, "head_dim global_head_dim swa_head_dim kv_channels attention_head_dim rotary_dim q_lora_rank kv_lora_rank"),
    (16, "v_head_dim index_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim"),
    (16, "attention_head_size query_pre_attn_scalar linear_head_dim image_size qk_rope_head_dim qk_nope_head_dim"),
    (8, "mamba_d_state state_size ssm_state_size mamba_n_heads mamba_num_heads linear_num_heads"),
    (8, "encoder_hash_byte_group_vocab"),
    (WINDOW, "sliding_window attention_window_size attention_chunk_size sliding_window_size window_size"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len context_length model_max_length"),
    (128, "mamba_d_ssm"),
    (0, "pad_token_id num_kv_shared_layers"),
]
SIZES = {name: size for size, names in _FIELDS for name in names.split()}
"""Small values by field name."""

_CONV, _LINEAR = ([kind] * 3 + ["full_attention"] for kind in ("conv", "linear_attention"))
_MIXED: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": _CONV},
    "lfm2_moe": {"layer_types": _CONV},
    "bamba": {"attn_layer_indices": [2]},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "kimi_linear": {"layer_types": _LINEAR, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
    "bailing_hybrid": {"layer_types": _LINEAR, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
}
"""By `model_type`: both kinds of layers of hybrids, of which a small number by default would be all of one kind; and
what else a class insists on."""

_WANTED = ("head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
"""Given also where the default is None."""


def tiny_config(cls: type[PretrainedConfig], **given: Any) -> PretrainedConfig:
    """A configuration of small sizes, its parts included.

    Args:
        cls: the class of the configuration.
        given: fields that are to have these values.

    Raises:
        Exception: whatever the class has to say against it.
    """
    default, problems = cls(), list[Exception]()
    for further in ({}, _shortened(default), {"num_key_value_heads": LAYERS}, {"num_heads": 2 * LAYERS}):
        try:
            return cls(**{**_small(default), **further, **given})
        except Exception as problem:  # noqa: BLE001 - whatever the class has to say
            problems.append(problem)
    raise problems[0]


def _shortened(default: PretrainedConfig) -> dict[str, Any]:
    """Lists with an entry a layer, for fewer layers: evenly chosen, so that all kinds have a chance."""
    fields = {name: value for name, value in vars(default).items() if isinstance(value, list | tuple)}
    return {
        name: [value[place * (len(value) - 1) // (LAYERS - 1)] for place in range(LAYERS)]
        for name, value in fields.items()
        if len(value) > LAYERS and len(value) == getattr(default, "num_hidden_layers", None)
    }


def fitting(cls: type[PreTrainedModel], config: PretrainedConfig) -> PretrainedConfig:
    """The part of a configuration that a class is made from, as transformers' own mapping has it."""
    parts = getattr(type(config), "sub_configs", {})
    return config.get_text_config() if cls.config_class is parts.get("text_config", 0) else config


def _small(default: PretrainedConfig) -> dict[str, Any]:
    fields: dict[str, Any] = dict(_MIXED.get(default.model_type, {}))
    parts = {name: getattr(default, name, None) for name in getattr(type(default), "sub_configs", {})}
    for name, value in vars(default).items():
        if name in parts or name in fields:
            continue
        if value is None and name in _WANTED:
            fields[name] = SIZES[name]
        elif name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            fields[name] = (
                min(SIZES[name], value) if name in ("num_kv_shared_layers spatial_merge_size",) else SIZES[name]
            )
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            fields[name] = min(value, VOCABULARY - 1)
        elif name == "rope_parameters" and isinstance(value, Mapping):
            fields[name] = _rotary(value)
    if "kv_lora_rank" in fields:  # latent attention has no groups
        fields["num_key_value_heads"] = LAYERS
    for name, part in parts.items():
        if isinstance(part, PretrainedConfig):
            fields[name] = {**_small(part), "model_type": part.model_type}
            if "rope_parameters" in fields[name]:  # several axes: the default sections are those of large heads
                fields[name]["rope_parameters"].setdefault("mrope_section", [2, 3, 3])
    return fields


def _rotary(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters for heads of 16: the sections of several axes are halves of that, together."""
    small = dict(parameters)
    if "mrope_section" in small:
        small["mrope_section"] = [2, 3, 3]
        small["partial_rotary_factor"] = 1.0
    return {name: _rotary(value) if isinstance(value, Mapping) else value for name, value in small.items()}


def tiny_model(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """A model in float64 whose greedy text wanders, and that never ends it."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model: Any = cls(fitting(cls, config))
        model.set_experts_implementation("eager")  # the others take no float64
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "norm" not in name:
                weight.data.normal_(0.0, 1.5 / math.sqrt(weight.shape[-1]))
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    if model.config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = 1
    small: PreTrainedModel = torch.nn.Module.to(model, torch.float64).eval()
    return small
