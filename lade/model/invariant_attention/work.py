"""The work of a call of attention: tensors as the kernel wants them, and threads that share it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from lade.model.invariant_attention.kernel import CHUNK, QUAD, Call, attend, kind_of, scratch_size
from lade.model.invariant_attention.placed_mask import PlacedMask

_ROWS = 64  # queries that share what is converted of keys and values
_SCORES = 2**18  # of a block at the most, where that leaves a quad: a megabyte
_MANY = 2**22  # multiplications that are worth a thread of their own


def attention_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: PlacedMask,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention, `[B, S, H, Dv]` float32.

    Args:
        query: `[B, H, S, D]`, of 16 or 32 bits, on the CPU like the others.
        key: `[B, Hkv, K, D]`, likewise.
        value: `[B, Hkv, K, Dv]`, likewise.
        mask: `[B, 1, S, K]`.
        scale: factor of the scores.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: `[H]`, the score of one more key of each head, which has no value.
    """
    rows, heads, step, size = query.shape
    kv_heads, slots = key.shape[1:3]
    query, key, value = query.float().contiguous(), _with_rows(key), _with_rows(value)
    allowed = _with_rows(mask.allowed.expand(rows, step, slots))
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.empty(rows, step, heads, value.shape[-1])
    lines = heads // kv_heads * step
    slots = -(-slots // CHUNK) * CHUNK
    block = min(_ROWS, -(-lines // QUAD) * QUAD, max(QUAD, _SCORES // slots // QUAD * QUAD))
    spans = mask.spans
    call = Call(
        query.data_ptr(),
        *_places(key),
        *_places(value),
        allowed=allowed.data_ptr(),
        allowed_row=allowed.stride(0),
        allowed_step=allowed.stride(1),
        spans=spans.data_ptr(),
        sinks=0 if sinks is None else sinks.data_ptr(),
        out=out.data_ptr(),
        rows=rows,
        heads=kv_heads,
        group=heads // kv_heads,
        step=step,
        size=size,
        value_size=value.shape[-1],
        block=block,
        blocks=-(-lines // block),
        slots=slots,
    )
    _run(call, scale, softcap or 0.0, query.numel() * slots)
    return out


def _with_rows(states: torch.Tensor) -> torch.Tensor:
    """Whose last dimension lies in one piece."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _places(states: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Where `[B, Hkv, K, D]` lies: its address, its strides and its dtype."""
    row, head, step, _ = (stride * states.itemsize for stride in states.stride())
    return states.data_ptr(), row, head, step, kind_of(states.dtype)


def _run(call: Call, scale: float, softcap: float, work: int) -> None:
    """Do all of it, in several threads where that takes long: torch's setting says in how many."""
    parts = max(1, min(torch.get_num_threads(), call.rows * call.heads * call.blocks, work // _MANY))

    def run(part: int) -> None:
        scratch = torch.empty(scratch_size(call))
        attend(call, scale, softcap, scratch.data_ptr(), part, parts)

    others = [_pool(parts - 1).submit(run, part) for part in range(1, parts)]
    run(0)
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads, kept from call to call."""
    return ThreadPoolExecutor(threads, "lade-attention")


os.register_at_fork(after_in_child=_pool.cache_clear)
