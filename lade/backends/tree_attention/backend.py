"""The tree attention backend: the implementation `lade_tree` of transformers' attention interface.

>>> import lade.backends.tree_attention.backend  # makes the name known to transformers
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="lade_tree")

An ordinary pass uses SDPA. A step over trees brings a `TreeMask`; then the Triton kernel reads the cache once, without
a dense mask and without copies of keys for the query heads that share them. Where the kernel cannot run (no CUDA, no
Triton, an unsupported dtype or size) the mask is made dense, and results are equal up to rounding.

Soft caps and attention sinks, which SDPA lacks, are computed in plain torch in an ordinary pass.
"""

from __future__ import annotations

from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from lade.backends.tree_attention.tree_mask import TreeInputs, TreeMask
from lade.model.inputs import TREE_ATTENTION, TREE_MASKS

NAME = TREE_ATTENTION
HAS_TRITON = find_spec("triton") is not None
"""True if Triton is installed, as with torch for CUDA on Linux; it is imported with the first tree."""


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [B, H, S, D]
    key: torch.Tensor,  # [B, Hkv, K, D]
    value: torch.Tensor,  # [B, Hkv, K, Dv]
    attention_mask: torch.Tensor | None,  # [B, 1, S, K]: a `TreeMask`, boolean or additive; None for causal attention
    dropout: float = 0.0,
    scaling: float | None = None,  # of scores; None for D ** -0.5
    softcap: float | None = None,  # scores s become softcap * tanh(s / softcap)
    s_aux: torch.Tensor | None = None,  # [H], attention sinks: score of a key without a value
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' attention interface asks for it.

    Returns:
        `[B, S, H, Dv]`, and None in place of attention weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_mask, TreeMask):
        kernel = kernel_for(query, key, value)
        plain = not dropout and kwargs.get("position_bias") is None and attention_mask.device == query.device
        if kernel is not None and plain:
            return kernel.attend(query, key, value, attention_mask, scale=scale, softcap=softcap, sinks=s_aux), None
        attention_mask = attention_mask.dense()
    if softcap is None and s_aux is None:
        found, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scale, **kwargs)
        return found, None
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{NAME} supports no position bias with soft caps or sinks: use attn_implementation='eager'")
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is None and is_causal and query.shape[2] > 1:
        attention_mask = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    weights = _weights(query, key, attention_mask, scale, softcap, s_aux)
    weights = torch.nn.functional.dropout(weights, dropout, module.training)
    return (weights @ _shared(value, query.shape[1])).transpose(1, 2).contiguous(), None


def kernel_for(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> ModuleType | None:
    """Return the module whose kernel supports these tensors; None if there is none."""
    if torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value)):
        return None
    kernel = _kernel()
    return kernel if kernel is not None and kernel.serves(query, key, value) else None


def _kernel() -> ModuleType | None:
    """Return the kernel's module; None without Triton."""
    if not HAS_TRITON:
        return None
    from lade.backends.tree_attention import launch

    return launch


def _weights(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention weights `[B, H, S, K]`; the softmax is computed in float32 or wider."""
    scores = query @ _shared(key, query.shape[1]).transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return weights if sinks is None else weights[..., :-1]


def _shared(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat keys or values `[B, Hkv, K, D]` for each query head: `[B, H, K, D]`."""
    return states.repeat_interleave(heads // states.shape[1], dim=1)


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class TreeAttentionBackend:
    """Compact masks for attention over token trees, see `lade.model.registry`."""

    inputs = staticmethod(TreeInputs.of)


TREE_MASKS.fill(TreeAttentionBackend())
