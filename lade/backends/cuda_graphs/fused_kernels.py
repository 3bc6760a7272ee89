"""Triton kernels of a decoder layer between its matrix products: norms, rotary embeddings, gated activations.

Each does in one launch what a model does in several, and rounds to the model's dtype after the same operations. All of
them work row by row, so what a token gets does not depend on what else is fed.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

ROWS = 64
_ACTIVATION_BLOCK = 1024
"""Numbers per program of the gated activation: a row of a large model is spread over a dozen multiprocessors."""


@triton.jit
def _norm(x, add, weight, total, out, columns, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < columns
    states = tl.load(x + row * columns + column, mask=inside, other=0.0)
    if ADD:
        states += tl.load(add + row * columns + column, mask=inside, other=0.0)
        tl.store(total + row * columns + column, states, mask=inside)
    wide = states.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide) / columns + eps)
    normed = (wide * scale).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, tl.load(weight + column, mask=inside, other=0.0) * normed, mask=inside)


@triton.jit
def _head_norm(states, other, weight, dim, turned, inside, size, eps):
    """Normalise a head and, by the same scale, its rotated half."""
    wide = states.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide) / size + eps)
    normed, turned_normed = (wide * scale).to(states.dtype), (other.to(tl.float32) * scale).to(states.dtype)
    states = tl.load(weight + dim, mask=inside, other=0.0) * normed
    other = tl.load(weight + turned, mask=inside, other=0.0) * turned_normed
    return states, other


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, q_norm, k_norm, query, keys, values, slots, step, row_stride, head_stride, slot_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Process one head of one token: queries go to `query`, keys and values to their slot of the cache."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, BLOCK)
    inside = dim < DIM
    source = qkv + token * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    states = tl.load(source + dim, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        turned = (dim + DIM // 2) % DIM
        other = tl.load(source + turned, mask=inside, other=0.0)
        if NORMS:
            weight = q_norm if head < HEADS else k_norm
            states, other = _head_norm(states, other, weight, dim, turned, inside, DIM, eps)
        other = tl.where(dim < DIM // 2, -other, other).to(tl.float32)
        along = states.to(tl.float32) * tl.load(cos + token * DIM + dim, mask=inside, other=0.0).to(tl.float32)
        across = other * tl.load(sin + token * DIM + dim, mask=inside, other=0.0).to(tl.float32)
        states = along.to(states.dtype) + across.to(states.dtype)
    if head < HEADS:
        tl.store(query + (token * HEADS + head) * DIM + dim, states, mask=inside)
    else:
        place = (token // step) * row_stride + tl.load(slots + token) * slot_stride + dim
        if head < HEADS + KV_HEADS:
            tl.store(keys + place + (head - HEADS) * head_stride, states, mask=inside)
        else:
            tl.store(values + place + (head - HEADS - KV_HEADS) * head_stride, states, mask=inside)


@triton.jit
def _silu_product(gate_up, out, columns, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_up + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * columns + column, mask=inside, other=0.0)
    active = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, active * up, mask=inside)


def roomy(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return an empty tensor `[..., N]` whose rows may be read on to a multiple of `ROWS`, in products of so many."""
    rows = math.prod(shape[:-1])
    return like.new_empty(-(-rows // ROWS) * ROWS, shape[-1])[:rows].view(shape)


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, add: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + add, or x itself, and its RMS norm (Zhang and Sennrich, arXiv 1910.07467), `[..., H]` each.

    Args:
        x: contiguous states, `[..., H]`.
        weight: `[H]`.
        eps: what is added to the mean of squares.
        add: what is added before, like `x`; None for nothing.
    """
    columns, out = x.shape[-1], roomy(x, *x.shape)
    total = x if add is None else torch.empty_like(x)
    _norm[(x.numel() // columns,)](
        x, x if add is None else add, weight, total, out, columns, eps,
        ADD=add is not None, BLOCK=triton.next_power_of_2(columns), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return total, out


def rotate_and_store(
    qkv: torch.Tensor,
    turns: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys by their positions, and write keys and values to the cache.

    Args:
        qkv: `[B, S, (H + 2 * Hkv) * D]`: queries, keys and values of all heads.
        turns: cosines and sines of the positions, contiguous `[B, S, D]` in the states' dtype.
        norms: weights `[D]` of the norms of queries' and keys' heads; None for none.
        eps: see `norm`.
        keys: cache `[B, Hkv, slots, D]`; written in place, as is `values`, which has the same strides.
        values: cache `[B, Hkv, slots, D]`.
        slots: `[B, S]` int64, slot of each token.

    Returns:
        Rotated queries, `[B, S, H, D]`.
    """
    rows, step, width = qkv.shape
    kv_heads, dim = keys.shape[1], keys.shape[-1]
    query = qkv.new_empty(rows, step, width // dim - 2 * kv_heads, dim)
    q_norm, k_norm = norms or (qkv, qkv)
    _rotate_and_store[(rows * step, width // dim)](
        qkv, *turns, q_norm, k_norm, query, keys, values, slots, step, *keys.stride()[:3], eps,
        HEADS=query.shape[2], KV_HEADS=kv_heads, DIM=dim, BLOCK=triton.next_power_of_2(dim), NORMS=norms is not None,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return query


def silu_product(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, `[..., I]`, of contiguous `[..., 2 * I]`: gates first (Shazeer, arXiv 2002.05202)."""
    columns = gate_up.shape[-1] // 2
    out = roomy(gate_up, *gate_up.shape[:-1], columns)
    grid = out.numel() // columns, triton.cdiv(columns, _ACTIVATION_BLOCK)
    _silu_product[grid](gate_up, out, columns, BLOCK=_ACTIVATION_BLOCK, num_warps=4, enable_fp_fusion=False)
    return out
