"""Attention of tensors: where they lie, and how the work is cut."""

from __future__ import annotations

import torch

from lade.model.invariant_attention.placed_mask import PlacedMask
from lade.model.kernels.attention import CHUNK, Call, attend, scratch_size
from lade.model.kernels.kinds import is_plain, kind_of, refuse
from lade.model.kernels.vectors import QUAD
from lade.model.worker_threads import bits, in_team

_ROWS = 64  # queries that share what is converted of keys and values
_SCORES = 2**18  # of a block at the most, where that leaves a quad: a megabyte
_OUT = {torch.bfloat16: torch.bfloat16}
_MANY = 2**18  # multiplications that are worth a thread of their own


def attention_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: PlacedMask,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention, `[B, S, H, Dv]`: float32, or bfloat16 as the queries are.

    Args:
        query: `[B, H, S, D]`, of 16 or 32 bits, on the CPU like the others.
        key: `[B, Hkv, K, D]`, likewise.
        value: `[B, Hkv, K, Dv]`, likewise.
        mask: `[B, 1, S, K]`.
        scale: factor of the scores.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: `[H]`, the score of one more key of each head, which has no value.

    Raises:
        ValueError: any of these is of another shape, dtype or device.
    """
    if not _fits(query, key, value, sinks):
        takes = "tensors on the CPU, [B, H, S, D], [B, Hkv, K, D], [B, Hkv, K, Dv] and [H]; neither D nor K is 0"
        refuse("attention", takes, query=query, key=key, value=value, sinks=sinks)
    rows, heads, step, size = query.shape
    _, kv_heads, keys, value_size = value.shape
    query, key, value = _with_rows(query), _with_rows(key), _with_rows(value)
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.empty(rows, step, heads, value_size, dtype=_OUT.get(query.dtype, torch.float32))
    if not out.numel():
        return out
    group = heads // kv_heads
    slots = -(-keys // CHUNK) * CHUNK
    block = min(_ROWS, -(-group * step // QUAD) * QUAD, max(QUAD, _SCORES // slots // QUAD * QUAD))
    call = Call(
        *_places(query),
        *_places(key),
        *_places(value),
        *mask.places(rows, step, keys),
        0 if sinks is None else sinks.data_ptr(),
        *(out.data_ptr(), kind_of(out.dtype)),
        *(rows, kv_heads, group, step, size, value_size, block, -(-group * step // block), slots),
    )

    most = min(rows * kv_heads * call.blocks, query.numel() * slots // _MANY)
    parts, size = max(1, min(torch.get_num_threads(), most)), scratch_size(call)
    scratch = torch.empty(parts * size)
    fields = scratch.data_ptr(), size, bits(scale), bits(softcap or 0.0), *call
    in_team(attend, fields, parts, holds=(query, key, value, mask, sinks, out, scratch))
    return out


def _fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None) -> bool:
    """Whether these belong together, and the kernel can read them; their dtypes are left to `kind_of`."""
    if not (is_plain(query) and is_plain(key) and is_plain(value) and query.dim() == key.dim() == value.dim() == 4):
        return False
    rows, heads, _, size = query.shape
    key_rows, kv_heads, keys, key_size = key.shape
    value_rows, value_heads, values, _ = value.shape
    alike = rows == key_rows == value_rows and kv_heads == value_heads and keys == values and size == key_size
    if not (alike and size and keys and kv_heads) or heads % kv_heads:
        return False
    return sinks is None or (is_plain(sinks) and sinks.shape == (heads,))


def _with_rows(states: torch.Tensor) -> torch.Tensor:
    """Whose last dimension lies in one piece."""
    return states if states.stride(-1) == 1 else states.contiguous()


def _places(states: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Where `[B, Hkv, K, D]` lies: its address, its strides and its dtype."""
    item, (row, head, step, _) = states.itemsize, states.stride()
    return states.data_ptr(), row * item, head * item, step * item, kind_of(states.dtype)
