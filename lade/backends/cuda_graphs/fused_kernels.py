"""Triton kernels of a decoder layer between its matrix products: norms, rotary embeddings, gated activations.

Each does in one launch what a model does in several, and rounds to the model's dtype after the same operations. All of
them work row by row, so what a token gets does not depend on what else is fed.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

ROWS = 64
TANH = "gelu_pytorch_tanh"
"""The activation that is no SiLU."""
_ACTIVATION_BLOCK = 1024
"""Numbers per program of the gated activation: a row of a large model is spread over a dozen multiprocessors."""


@triton.jit
def _scaled(states, scale, weight, inside, FROM_ONE: tl.constexpr):
    """Multiply states by their scale and a norm's weights, which Gemma adds to one, without rounding in between."""
    given = tl.load(weight, mask=inside, other=0.0)
    wide = states.to(tl.float32) * scale
    if FROM_ONE:
        return (wide * (1.0 + given.to(tl.float32))).to(states.dtype)
    return given * wide.to(states.dtype)


@triton.jit
def _inverse_rms(states, size, eps):
    wide = states.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(wide * wide) / size + eps)


@triton.jit
def _norm(
    x, add, add_weight, weight, total, out, columns, eps,
    ADD: tl.constexpr, ADD_NORM: tl.constexpr, FROM_ONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < columns
    states = tl.load(x + row * columns + column, mask=inside, other=0.0)
    if ADD:
        added = tl.load(add + row * columns + column, mask=inside, other=0.0)
        if ADD_NORM:
            added = _scaled(added, _inverse_rms(added, columns, eps), add_weight + column, inside, FROM_ONE)
        states += added
        tl.store(total + row * columns + column, states, mask=inside)
    normed = _scaled(states, _inverse_rms(states, columns, eps), weight + column, inside, FROM_ONE)
    tl.store(out + row * columns + column, normed, mask=inside)


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, q_norm, k_norm, query, keys, values, slots, step, row_stride, head_stride, slot_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, NORMS: tl.constexpr,
    FROM_ONE: tl.constexpr,
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
            weight, scale = q_norm if head < HEADS else k_norm, _inverse_rms(states, DIM, eps)
            states = _scaled(states, scale, weight + dim, inside, FROM_ONE)
            other = _scaled(other, scale, weight + turned, inside, FROM_ONE)
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
def _gated_product(gate_up, out, columns, TANH: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_up + row * 2 * columns + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * columns + column, mask=inside, other=0.0)
    turn = gate
    if TANH:  # 0.5 (1 + tanh(t)) is the logistic function of 2 t
        turn = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = (gate / (1.0 + tl.exp(-turn))).to(out.dtype.element_ty)
    tl.store(out + row * columns + column, active * up, mask=inside)


def roomy(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return an empty tensor `[..., N]` whose rows may be read on to a multiple of `ROWS`, in products of so many."""
    rows = math.prod(shape[:-1])
    return like.new_empty(-(-rows // ROWS) * ROWS, shape[-1])[:rows].view(shape)


class Norm(NamedTuple):
    """An RMS norm (Zhang and Sennrich, arXiv 1910.07467)."""

    weight: torch.Tensor  # [H]
    eps: float  # added to the mean of squares
    from_one: bool  # whether `weight` is the difference to 1.0, and results are rounded once, as in Gemma

    @classmethod
    def of(cls, module: Any) -> Norm:
        """Return the norm of a module of transformers, whose weight it reads."""
        from_one = not hasattr(module, "variance_epsilon")
        return cls(module.weight.detach(), module.eps if from_one else module.variance_epsilon, from_one)


def norm(
    x: torch.Tensor, by: Norm, add: torch.Tensor | None = None, add_norm: Norm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + add, or x itself, and its norm, `[..., H]` each; x is contiguous.

    With `add_norm`, a norm of the same kind, what is added is normed as well.
    """
    columns, out = x.shape[-1], roomy(x, *x.shape)
    total = x if add is None else torch.empty_like(x)
    _norm[(x.numel() // columns,)](
        x, x if add is None else add, by.weight if add_norm is None else add_norm.weight, by.weight, total, out,
        columns, by.eps, ADD=add is not None, ADD_NORM=add_norm is not None, FROM_ONE=by.from_one,
        BLOCK=triton.next_power_of_2(columns), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return total, out


def rotate_and_store(
    qkv: torch.Tensor,  # [B, S, (H + 2 * Hkv) * D]: queries, keys and values of all heads
    turns: tuple[torch.Tensor, torch.Tensor],  # cosines and sines, contiguous [B, S, D] in the dtype of `qkv`
    norms: tuple[Norm, Norm] | None,  # of queries' and of keys' heads, of one kind; None for none
    keys: torch.Tensor,  # cache [B, Hkv, slots, D], written in place
    values: torch.Tensor,  # like `keys`, with the same strides
    slots: torch.Tensor,  # [B, S] int64, slot of each token
) -> torch.Tensor:
    """Write keys and values to the cache; return rotated queries, `[B, S, H, D]`, as the keys are."""
    rows, step, width = qkv.shape
    kv_heads, dim = keys.shape[1], keys.shape[-1]
    query = qkv.new_empty(rows, step, width // dim - 2 * kv_heads, dim)
    q_norm, k_norm = norms or [Norm(qkv, 0.0, from_one=False)] * 2
    _rotate_and_store[(rows * step, width // dim)](
        qkv, *turns, q_norm.weight, k_norm.weight, query, keys, values, slots, step, *keys.stride()[:3], q_norm.eps,
        HEADS=query.shape[2], KV_HEADS=kv_heads, DIM=dim, BLOCK=triton.next_power_of_2(dim), NORMS=norms is not None,
        FROM_ONE=q_norm.from_one, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return query


def gated_product(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Return activation(gate) * up, `[..., I]`, of contiguous `[..., 2 * I]`: gates first (Shazeer, arXiv 2002.05202).

    The activation is `TANH`, or SiLU by any name.
    """
    columns = gate_up.shape[-1] // 2
    out = roomy(gate_up, *gate_up.shape[:-1], columns)
    grid = out.numel() // columns, triton.cdiv(columns, _ACTIVATION_BLOCK)
    _gated_product[grid](
        gate_up, out, columns,
        TANH=activation == TANH, BLOCK=_ACTIVATION_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
