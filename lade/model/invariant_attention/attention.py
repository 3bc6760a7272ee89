"""The attention implementation `lade_invariant`: a query's result depends on the keys that it sees, on nothing else.

Attention as PyTorch has it rounds otherwise for one query than for sixteen, and for 64 keys than for 65. Here

- scores are products over the head's size, whose order of summation does not depend on how many there are;
- the largest score is taken over all keys, which rounds nothing;
- weighted values are summed up from the first key to the last (`sums.py`).

So a node of a tree gets bit for bit what plain decoding gives the same text: the keys that it sees lie in the cache in
the order of their positions, and the others have the weight zero. A few queries are filled up to `LEAST_ROWS`, and a
few keys to `COLUMNS`, since matrix products take other kernels for a few. What is said here of matrix products is tried
before it is believed (`lade.model.invariant.attention_trial`). That a result must not depend on how the work is cut is
the idea of Thinking Machines' "Defeating nondeterminism in LLM inference" (2025).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from lade.model.invariant_attention.pieces import Piece
from lade.model.invariant_attention.placed_mask import PlacedMask, placed_mask
from lade.model.invariant_attention.sums import weighted_sums

NAME = "lade_invariant"
LEAST_ROWS, ROWS = 12, 4
"""Rows of a matrix product are at least so many, and a multiple of the second: MKL sums a large head's products in
another order for up to 8."""
COLUMNS = 64
"""The least number of columns of a matrix product."""


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
        ValueError: a mask of unknown positions, a bias of the scores, or dropout.
    """
    if dropout or kwargs.get("position_bias") is not None:
        raise ValueError(f'{NAME!r} has no dropout and no position bias: use attn_implementation="eager"')
    if attention_mask is None:
        attention_mask = _mask_of(query, key, causal=_is_causal(module, kwargs))
    if not isinstance(attention_mask, PlacedMask):
        raise ValueError(
            f"{NAME!r} was given a mask {list(attention_mask.shape)} that does not say at which positions keys lie: "
            'give a mask of two dimensions, or use attn_implementation="sdpa"'
        )
    rows, heads, step, dim = query.shape
    scale = dim**-0.5 if scaling is None else scaling
    grouped = query.unflatten(1, (key.shape[1], -1))  # [B, Hkv, G, S, D]
    sinks = None if s_aux is None else s_aux.float().view(key.shape[1], -1, 1, 1)  # [Hkv, G, 1, 1]
    out = query.new_empty(rows, step, heads, value.shape[-1])
    for piece in attention_mask.pieces:
        states = (grouped[:, :, :, piece.queries], key[:, :, piece.slots], value[:, :, piece.slots])
        found = _attend(*states, piece, scale, softcap, sinks)  # [B, Hkv, G, S, Dv]
        out[:, piece.queries] = found.flatten(1, 2).transpose(1, 2)
    return out, None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    piece: Piece,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one piece, `[B, Hkv, G, S, Dv]` float32.

    Args:
        query: `[B, Hkv, G, S, D]`.
        key: `[B, Hkv, N, D]`, of the piece's slots.
        value: `[B, Hkv, N, Dv]`.
        piece: where the keys lie.
        scale: factor of the scores.
        softcap: of the scores.
        sinks: `[Hkv, G, 1, 1]` float32.
    """
    group, step = query.shape[2:4]
    filled = _filled(query.float().mul(scale).flatten(2, 3))  # [B, Hkv, R, D]
    columns = _at_least(key.float(), COLUMNS).transpose(2, 3)  # [B, Hkv, D, N or 64]
    scores = _product(filled, columns)[:, :, : group * step, : key.shape[2]].contiguous()  # [B, Hkv, G * S, N]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if piece.common < scores.shape[-1]:
        by_query = scores.unflatten(2, (group, step))[..., piece.common :]
        by_query.masked_fill_(piece.hidden[:, None], -torch.inf)
    highest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)  # [B, Hkv, G * S, 1]
    if sinks is not None:
        sinks = sinks.expand(-1, -1, step, 1).flatten(1, 2)  # [Hkv, G * S, 1]
        highest = torch.maximum(highest, sinks)
    values, total = weighted_sums(scores.sub_(highest).exp_(), value)
    if sinks is not None:
        total = total + (sinks - highest).exp()
    found: torch.Tensor = (values / total.masked_fill(total == 0, 1.0)).unflatten(2, (group, step))
    return found


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Matrix products `[..., R, K]` by `[..., K, N]`, of one kernel however many there are."""
    products: torch.Tensor = torch.bmm(left.flatten(0, -3), right.flatten(0, -3)).unflatten(0, left.shape[:-2])
    return products


def _filled(states: torch.Tensor) -> torch.Tensor:
    """`[..., R, D]` with rows of zeros up to as many as a product needs."""
    return _at_least(states, max(LEAST_ROWS, -(-states.shape[-2] // ROWS) * ROWS))


def _at_least(states: torch.Tensor, least: int) -> torch.Tensor:
    """`[..., N, D]` with rows of zeros up to this many."""
    missing = least - states.shape[-2]
    return torch.nn.functional.pad(states, (0, 0, 0, missing)) if missing > 0 else states


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
