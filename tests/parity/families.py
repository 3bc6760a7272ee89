"""Tiny models with random weights, one factory for every architecture that the tests cover.

Random weights of the usual size make a model repeat one token for ever, or its tokens never recur; neither says much
about guesses. Here every matrix is drawn with a spread that keeps activations near 1, so that texts wander and loop,
and attention weighs enough for a wrong mask to change the text.
"""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

VOCABULARY = 64
WINDOW = 12
CONTEXT = 512
SWITCH = 32

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_GPT2 = {"n_embd": 32, "n_layer": 4, "n_head": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_EXPERTS,
}  # fmt: skip
_INDEXED = {
    **{name: size for name, size in _LATENT.items() if name != "first_k_dense_replace"}, "num_key_value_heads": 4,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3, "index_topk": 10, "index_head_dim": 16,
    "index_n_heads": 2,  # so that many scores are 0
}  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_WINDOWED = {"sliding_window": WINDOW}
_GEMMA4 = {
    **_GROUPED, **_WINDOWED, "layer_types": _ALTERNATING, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 16,  # of full layers: head_dim is no longer one number
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One architecture in one shape.

    Attributes:
        model_type: as in `config.json`.
        extra: fields of its config beside the common sizes.
        backends: attention implementations of its class.
        dtype: float64 unless the architecture itself fails in it.
        name: of the test; the model type unless one type is tried in several shapes.
    """

    model_type: str
    extra: dict[str, Any] = field(default_factory=dict)
    backends: tuple[str, ...] = ("sdpa", "eager")
    dtype: torch.dtype = torch.float64
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.model_type

    def build(
        self, backend: str | None = None, seed: int = 0, dtype: torch.dtype | None = None, **overrides: Any
    ) -> PreTrainedModel:
        """A model in evaluation mode, its weights drawn from `seed`.

        Args:
            backend: attention implementation; the first of `backends` by default.
            seed: of the weights.
            dtype: of the weights; the family's by default.
            overrides: fields of the config.
        """
        if self.model_type not in CONFIG_MAPPING:
            pytest.skip(f"transformers {transformers.__version__} has no {self.model_type}")
        fields = copy.deepcopy({**_SIZES, **self.extra, **overrides})
        config = AutoConfig.for_model(self.model_type, **fields)
        chosen = {"attn_implementation": backend or self.backends[0]}
        if hasattr(config, "num_experts_per_tok") or getattr(config, "top_k_experts", None):
            chosen["experts_implementation"] = "eager"  # grouped matrix products refuse float64
        with warnings.catch_warnings():  # transformers 5.17, when it imports gpt_bigcode
            warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
            model = AutoModelForCausalLM.from_config(config, **chosen)
        model.generation_config = GenerationConfig()
        return randomize(model, seed).to(dtype or self.dtype).eval()


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int, gain: float = 1.0) -> PreTrainedModel:
    """Draw all weights anew: matrices keep a signal's size (times `gain`), vectors move a little."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(noise * (gain / math.sqrt(parameter.shape[-1])))
    embeddings = model.get_input_embeddings().weight
    embeddings.copy_(torch.randn(embeddings.shape, generator=generator))
    return model


FAMILIES = [
    Family("llama", _GROUPED),
    Family("mistral", {**_GROUPED, "sliding_window": None}),
    Family("mistral", {**_GROUPED, **_WINDOWED}, name="mistral-window"),
    Family("mixtral", {**_GROUPED, "num_local_experts": 4, "sliding_window": None}),
    Family("mixtral", {**_GROUPED, "num_local_experts": 4, **_WINDOWED}, name="mixtral-window"),
    Family("qwen2", _GROUPED),
    Family("qwen2", {**_GROUPED, **_WINDOWED, "use_sliding_window": True, "max_window_layers": 2},
        name="qwen2-window"),
    Family("qwen3", _GROUPED),
    Family("qwen3_moe", {**_GROUPED, **_EXPERTS, "num_experts": 4}),
    Family("qwen3_moe", {**_GROUPED, **_EXPERTS, **_WINDOWED, "num_experts": 4, "use_sliding_window": True},
        name="qwen3_moe-window"),
    Family("gemma", _GROUPED),
    Family("gemma2", {**_GROUPED, **_WINDOWED, "query_pre_attn_scalar": 8}, ("eager",)),
    Family("gemma3_text", {**_GROUPED, **_WINDOWED, "query_pre_attn_scalar": 8, "layer_types": _ALTERNATING}),
    Family("gemma4_text", {**_GEMMA4, "num_kv_shared_layers": 2}),
    Family("gemma4_text", {**_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 24}, name="gemma4_text-experts"),
    Family("gemma4_unified_text", {**_GEMMA4, "num_global_key_value_heads": 1}),
    Family("phi", {"partial_rotary_factor": 0.5}),
    Family("phi3", {"num_key_value_heads": 2, "sliding_window": None}),
    Family("phi3", {"num_key_value_heads": 2, **_WINDOWED}, name="phi3-window"),
    Family("gpt2", _GPT2),
    Family("gptj", {**_GPT2, "rotary_dim": 4}, ("eager",)),
    Family("gpt_neox", {"rotary_pct": 0.5}),
    Family("gpt_bigcode", _GPT2),
    Family("gpt_bigcode", {**_GPT2, "multi_query": False}, name="gpt_bigcode-heads"),
    Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    Family("falcon", {"alibi": False, "new_decoder_architecture": False, "multi_query": True}),
    Family("falcon", {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}, name="falcon-new"),
    Family("olmo2", _GROUPED),
    Family("olmo3", {**_GROUPED, **_WINDOWED}),
    Family("olmoe", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    Family("granite", {**_GROUPED}),
    Family("smollm3", {**_GROUPED}),
    Family("cohere", {**_GROUPED, "logit_scale": 1.0}),
    Family("cohere2", {**_GROUPED, **_WINDOWED, "logit_scale": 1.0}),
    Family("starcoder2", {**_GROUPED, "sliding_window": None}),
    Family("starcoder2", {**_GROUPED, **_WINDOWED}, name="starcoder2-window"),
    Family("stablelm", {"num_key_value_heads": 2, "partial_rotary_factor": 0.5}),
    Family("deepseek_v3", {"num_key_value_heads": 4, **_LATENT}),
    Family("llama4_text", {**_GROUPED, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48,
        "num_local_experts": 4, "num_experts_per_tok": 1, "floor_scale": 4, "attn_scale": 2.0}),
    Family("gpt_oss", {**_GROUPED, **_WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2}, ("eager",)),
    Family("glm4", _GROUPED),
    Family("bloom", {"n_layer": 4, "n_head": 4}, ("eager",)),
    Family("codegen", {**_GPT2, "rotary_dim": 4}, ("eager",)),
    Family("ernie4_5", _GROUPED),
    Family("exaone4", {**_GROUPED, **_WINDOWED, "sliding_window_pattern": 2}),
    Family("hunyuan_v1_dense", _GROUPED),
    Family("olmo", {"num_key_value_heads": 2}),
    Family("nemotron", {**_GROUPED, "partial_rotary_factor": 0.5}),
    Family("persimmon", {"partial_rotary_factor": 0.5}),
    Family("helium", _GROUPED),
    Family("granitemoe", {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("deepseek_v2", {"num_key_value_heads": 4, **_LATENT, "topk_method": "greedy"}),
    Family("glm", _GROUPED),
    Family("cohere2_moe", {**_GROUPED, **_WINDOWED, "num_experts": 4, "num_experts_per_tok": 2, "logit_scale": 1.0}),
    Family("cwm", {**_GROUPED, **_WINDOWED, "bos_token_id": 1}),
    Family("exaone_moe", {**_GROUPED, **_WINDOWED, **_EXPERTS, "num_experts": 4, "first_k_dense_replace": 1}),
    Family("vaultgemma", {**_GROUPED, **_WINDOWED, "query_pre_attn_scalar": 8}, ("eager",)),
    Family("deepseek_v32", _INDEXED),
    Family("glm_moe_dsa", {**_INDEXED, "indexer_types": ["full", "shared"] * 2}),
    Family("axk2", _INDEXED),
    Family("hy_v4", {**_INDEXED, "indexer_types": ["full", "shared"] * 2}, ("eager",)),
    Family("gemma3_text", {**_GROUPED, **_WINDOWED, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention"] * 4}, name="gemma3_text-all-sliding"),
]  # fmt: skip
_LINEAR, _CONV = ([kind] * 3 + ["full_attention"] for kind in ("linear_attention", "conv"))
_SHARED_EXPERT = {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
_DELTA_RULE = {
    **_GROUPED, "layer_types": _LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_KIMI = {
    **{name: size for name, size in _LATENT.items() if name not in ("n_routed_experts", "first_k_dense_replace")},
    "layer_types": _LINEAR, "num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 8,
    "linear_conv_kernel_dim": 4, "qk_rope_head_dim": 4, "num_local_experts": 4, "n_shared_experts": 1,
    "mlp_layer_types": ["dense"] + ["sparse"] * 3,
}  # fmt: skip
_MAMBA2 = {
    "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
_MAMBA = {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4}
RECURRENT_FAMILIES = [
    Family("qwen3_5_text", _DELTA_RULE),
    Family("qwen3_5_moe_text", {**_DELTA_RULE, **_SHARED_EXPERT}),
    Family("qwen3_next", {**_DELTA_RULE, **_SHARED_EXPERT, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    Family("olmo_hybrid", {**_DELTA_RULE, "linear_num_key_heads": 4}),
    Family("kimi_linear", {**_KIMI, "q_lora_rank": None}),
    Family("bailing_hybrid", _KIMI),
    Family("bamba", {**_MAMBA2, "attn_layer_indices": [2]}),
    Family("granitemoehybrid", {**_MAMBA2, "layer_types": _LINEAR, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32}),
    Family("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 64, "head_dim": 8}),
    Family("nemotron_h", {**_EXPERTS, "num_key_value_heads": 2, "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"],
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4,
        "chunk_size": 16, "head_dim": 8, "n_routed_experts": 4, "moe_shared_expert_intermediate_size": 16,
        "n_group": 1, "topk_group": 1}),
    Family("zamba2", {"num_key_value_heads": 2, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_ngroups": 2, "n_mamba_heads": 8, "chunk_size": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_mem_blocks": 1,
        "use_shared_attention_adapter": False, "adapter_rank": 8, "attention_head_dim": 16, "use_mem_rope": True}),
    Family("lfm3", {**_GROUPED, **_WINDOWED, "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
        "conv_L_cache": 7}),
    Family("lfm3", {**_GROUPED, "layer_types": _CONV, "conv_L_cache": 7}, name="lfm3-no-window"),
    Family("jamba", {"num_key_value_heads": 2, "attn_layer_period": 4, "attn_layer_offset": 2,
        "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4}),
    Family("mamba", _MAMBA, ("eager",)),
    Family("falcon_mamba", _MAMBA, ("eager",)),
    Family("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "conv_kernel": 4, "expand": 2,
        "chunk_size": 16}, ("eager",)),
    Family("lfm2", {"num_key_value_heads": 2, "layer_types": _CONV, "conv_L_cache": 3}),
    Family("lfm2_moe", {**_EXPERTS, "num_key_value_heads": 2, "layer_types": _CONV, "conv_L_cache": 3,
        "num_experts": 4, "num_dense_layers": 1}),
]  # fmt: skip
UNLISTED = [Family("arcee", _GROUPED), Family("biogpt"), Family("ministral", {**_GROUPED, **_WINDOWED})]


def family(name: str) -> Family:
    """The family of that name."""
    return next(family for family in [*FAMILIES, *UNLISTED, *RECURRENT_FAMILIES] if str(family) == name)


DYNAMIC = {
    "max_position_embeddings": SWITCH,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
}
"""Config fields of a rotary scaling whose frequencies go by the length, from `SWITCH` on."""


def longrope(context: int = 128) -> dict[str, Any]:
    """Config fields of a rotary scaling that changes its frequencies at `SWITCH`; for heads of 8."""
    return {
        "max_position_embeddings": context,
        "original_max_position_embeddings": SWITCH,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 5.0, 8.0],
            "original_max_position_embeddings": SWITCH,
        },
    }
