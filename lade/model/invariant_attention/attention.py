"""The attention implementation `lade_invariant`: a query's result depends on the keys that it sees, on nothing else.

Attention as PyTorch has it rounds otherwise for one query than for sixteen, and for 64 keys than for 65. Here each
query goes through the same instructions, one key after another, whatever is beside it (`kernels/attention.py`). So a
node of a tree gets bit for bit what plain decoding gives the same text: the keys that it sees lie in the cache in the
order of their positions, and the others have the weight zero. That a result must not depend on how the work is cut is
the idea of Thinking Machines' "Defeating nondeterminism in LLM inference" (2025).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from lade.model.invariant_attention.placed_mask import PlacedMask, placed_mask
from lade.model.invariant_attention.work import attention_of

NAME = "lade_invariant"
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def invariant_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' interface wants it, for inference.

    Args:
        module: the attention layer.
        query: `[B, H, S, D]`, float32, bfloat16 or float16; sums are in float32.
        key: `[B, Hkv, K, D]`.
        value: `[B, Hkv, K, Dv]`.
        attention_mask: a `PlacedMask`; None for queries that are the last of the keys, or of an encoder.
        dropout: has to be 0.
        scaling: factor of the scores; `D ** -0.5` if not given.
        softcap: scores s become softcap * tanh(s / softcap).
        s_aux: `[H]`, attention sinks: the score of one more key of each head, which has no value.
        kwargs: other arguments, among them `is_causal`.

    Returns:
        `[B, S, H, Dv]`, and no weights; 0 where a query sees nothing.

    Raises:
        ValueError: a mask of unknown positions, a bias of the scores, dropout, gradients, or states of another dtype,
            device or shape.
    """
    if dropout or kwargs.get("position_bias") is not None:
        raise ValueError(f'{NAME!r} has no dropout and no position bias: use attn_implementation="eager"')
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise ValueError(f"{NAME!r} has no gradients: call the model under torch.no_grad()")
    if query.device.type != "cpu":
        raise ValueError(f"{NAME!r} was given states on {query.device}, and is for the CPU: use lade.variant(model)")
    if query.dtype not in DTYPES:
        raise ValueError(f"{NAME!r} was given {query.dtype}, and is for 16 and 32 bits: use lade.variant(model)")
    if attention_mask is None:
        attention_mask = _mask_of(query, key, causal=_is_causal(module, kwargs))
    if not isinstance(attention_mask, PlacedMask):
        raise ValueError(
            f"{NAME!r} was given a mask {list(attention_mask.shape)} that does not say at which positions keys lie: "
            'give a mask of two dimensions, or use attn_implementation="sdpa"'
        )
    scale = max(query.shape[-1], 1) ** -0.5 if scaling is None else scaling
    return attention_of(query, key, value, attention_mask, scale, softcap, s_aux).to(query.dtype), None


def _is_causal(module: torch.nn.Module, kwargs: dict[str, Any]) -> bool:
    is_causal = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _mask_of(query: torch.Tensor, key: torch.Tensor, *, causal: bool) -> PlacedMask:
    """The mask of a pass that has none: all keys, or those before a query and its own."""
    rows, step, slots = len(query), query.shape[2], key.shape[2]
    allowed = torch.ones(step, slots, dtype=torch.bool, device=query.device)
    allowed = allowed.tril(slots - step) if causal else allowed
    positions = torch.arange(slots, device=query.device).expand(rows, -1)
    return PlacedMask.of(allowed.expand(rows, 1, -1, -1), positions)


AttentionInterface.register(NAME, invariant_attention)
AttentionMaskInterface.register(NAME, placed_mask)
