"""Launch of the tree attention kernels: eligibility, tiling, splits."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from lade.backends.tree_attention.kernel import attend_tile, merge_splits
from lade.backends.tree_attention.tree_mask import TreeMask

LOG2E = math.log2(math.e)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
MOST_SPLITS = 64
LEAST_KEYS = 128
"""A program that reads fewer keys is not worth its launch."""
WAVES = 2
"""Programs wanted for each multiprocessor."""


@dataclass(frozen=True)
class Tiles:
    """How the work is cut: what decides the speed of `attend`, and not its result.

    Attributes:
        queries: queries of a program, over all heads that share their keys; a power of two from 16 on.
        keys: keys that are read at a time; a power of two from 16 on.
        splits: programs that share the keys of one tile of queries.
        warps: warps of a program.
        stages: depth of the pipeline that reads ahead.
    """

    queries: int
    keys: int
    splits: int
    warps: int
    stages: int

    @classmethod
    def fitting(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tiles:
        """A guess for these shapes (those of `attend`): what compiles for compute capability 8.0 and 9.0 without
        spilling registers to speak of, and in the 99 KB of shared memory that the smallest of these GPUs have.
        """
        rows, kv_heads, slots, dim = key.shape
        wanted = query.shape[2] * (query.shape[1] // kv_heads)
        wide, exact = max(dim, value.shape[-1]) > 128, key.element_size() == 4
        queries = min(max(16, triton.next_power_of_2(wanted)), 16 if exact else 32 if wide else 128)
        programs = triton.cdiv(wanted, queries) * rows * kv_heads
        splits = triton.cdiv(WAVES * _multiprocessors(key.device), programs)
        splits = max(1, min(splits, triton.cdiv(slots, LEAST_KEYS), MOST_SPLITS))
        keys = 64 // (2 if wide else 1) // (2 if exact else 1)
        return cls(queries, keys, splits, warps=8 if exact or queries > 64 else 4, stages=3 if queries <= 32 else 2)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def interprets() -> bool:
    """Whether Triton's interpreter runs these kernels, on any device, instead of compiled code."""
    return not isinstance(attend_tile, triton.runtime.JITFunction)


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `attend` takes queries, keys and values like these."""
    if not query.dtype == key.dtype == value.dtype or max(key.shape[-1], value.shape[-1]) > LARGEST_HEAD:
        return False
    if max(states.shape[2] * states.stride(2) for states in (query, key, value)) >= 2**31:
        return False  # slots are counted in 32 bits within a head: twice as fast, and enough for millions of tokens
    if interprets():
        return query.dtype in DTYPES and query.dtype != torch.bfloat16  # which it multiplies as if they were integers
    return query.dtype in DTYPES and query.is_cuda


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: TreeMask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Attention of the queries of a tree.

    Args:
        query: `[B, H, S, D]`, float32, float16 or bfloat16.
        key: `[B, Hkv, K, D]` of the same dtype; query heads h * H / Hkv and following share head h.
        value: `[B, Hkv, K, Dv]`.
        mask: `[B, 1, S, K]`.
        scale: factor of the scores.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: `[H]`, the score of one more key of each head, which has no value.
        tiles: sizes that the work is cut into.

    Returns:
        `[B, S, H, Dv]` in the dtype of `query`; 0 where a query sees nothing.
    """
    query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
    rows, heads, step, _ = query.shape
    kv_heads, value_dim, at, span = key.shape[1], value.shape[-1], mask.slots, mask.span
    tiles = tiles or Tiles.fitting(query, key, value)
    out = query.new_empty(rows, step, heads, value_dim)
    parts = query.new_empty(tiles.splits, *out.shape, dtype=torch.float32) if tiles.splits > 1 else out
    log_sums = query.new_empty(parts.shape[:-1], dtype=torch.float32)
    grid = (triton.cdiv(step * (heads // kv_heads), tiles.queries), tiles.splits, rows * kv_heads)
    with torch.cuda.device_of(query):  # Triton launches on the current device
        attend_tile[grid](
            query, key, value, sinks, parts, log_sums,
            at.lengths, at.firsts, at.positions, at.node_positions, at.ancestors,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            step, at.node_positions.shape[1], at.ancestors.shape[2], span.window or span.chunk or 0,
            scale * LOG2E / (softcap or 1.0), (softcap or 0.0) * LOG2E, LOG2E,
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, SPLITS=tiles.splits,
            WINDOW=bool(span.window), CHUNK=bool(span.chunk), SOFTCAP=bool(softcap), SINKS=sinks is not None,
            KEY_DIM=key.shape[-1], VALUE_DIM=value_dim,
            KEY_BLOCK=_block(key.shape[-1]), VALUE_BLOCK=_block(value_dim),
            TILE=tiles.queries, KEYS=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True,
        )  # fmt: skip
        if tiles.splits > 1:
            _merge(parts, log_sums, out)
    return out


def _merge(parts: torch.Tensor, log_sums: torch.Tensor, out: torch.Tensor) -> None:
    """Write the whole attention into `out`, `[B, S, H, Dv]`.

    Args:
        parts: `[splits, B, S, H, Dv]` float32, attention to the keys of each split.
        log_sums: `[splits, B, S, H]` float32, log2 of what each split has summed up.
        out: is written.
    """
    splits, queries, value_dim = len(parts), log_sums[0].numel(), out.shape[-1]
    merge_splits[(queries,)](
        parts, log_sums, out, queries,
        SPLITS=splits, SPLIT_BLOCK=triton.next_power_of_2(splits),
        VALUE_DIM=value_dim, VALUE_BLOCK=_block(value_dim), num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip


def _block(dim: int) -> int:
    """The dimension as matrix products want it: a power of two from 16 on."""
    return max(16, int(triton.next_power_of_2(dim)))
