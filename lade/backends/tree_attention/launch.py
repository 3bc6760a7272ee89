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
"""Least keys per program that are worth a launch."""
WAVES = 2
"""Programs to launch per multiprocessor."""


@dataclass(frozen=True)
class Tiles:
    """Tiling of the work, which affects the speed of `attend` but not its result."""

    queries: int  # per program, over all heads that share keys; a power of two, at least 16
    keys: int  # read at a time; a power of two, at least 16
    splits: int  # programs that share the keys of one tile of queries
    warps: int  # per program
    stages: int  # depth of the software pipeline

    @classmethod
    def fitting(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Tiles:
        """Return a tiling for tensors of these shapes, see `attend`.

        It compiles for compute capability 8.0 and 9.0 with little register spilling, and within the 99 KB of shared
        memory that the smallest of these GPUs have.
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
    """Return True if Triton's interpreter runs these kernels, on any device, instead of compiled code."""
    return not isinstance(attend_tile, triton.runtime.JITFunction)


def serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if `attend` supports these queries, keys and values."""
    if not query.dtype == key.dtype == value.dtype or max(key.shape[-1], value.shape[-1]) > LARGEST_HEAD:
        return False
    if max(states.shape[2] * states.stride(2) for states in (query, key, value)) >= 2**31:
        return False  # offsets within a head are 32-bit: twice as fast, and enough for millions of tokens
    if interprets():
        return query.dtype in DTYPES and query.dtype != torch.bfloat16  # multiplied as integers there
    return query.dtype in DTYPES and query.is_cuda


def attend(
    query: torch.Tensor,  # [B, H, S, D], float32, float16 or bfloat16, as keys and values
    key: torch.Tensor,  # [B, Hkv, K, D]; H / Hkv consecutive query heads share a KV head
    value: torch.Tensor,  # [B, Hkv, K, Dv]
    mask: TreeMask,  # [B, 1, S, K]
    *,
    scale: float,
    softcap: float | None = None,  # scores s become softcap * tanh(s / softcap)
    sinks: torch.Tensor | None = None,  # [H], score of a key without a value
    tiles: Tiles | None = None,  # None to choose them
) -> torch.Tensor:
    """Compute attention of the queries of a tree, `[B, S, H, Dv]`; 0 where a query sees nothing."""
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
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, SPLIT=tiles.splits > 1,
            WINDOW=bool(span.window), CHUNK=bool(span.chunk), SOFTCAP=bool(softcap), SINKS=sinks is not None,
            KEY_DIM=key.shape[-1], VALUE_DIM=value_dim,
            KEY_BLOCK=_block(key.shape[-1]), VALUE_BLOCK=_block(value_dim),
            TILE=tiles.queries, KEYS=tiles.keys, num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True,
        )  # fmt: skip
        if tiles.splits > 1:
            _merge(parts, log_sums, out)
    return out


def _merge(parts: torch.Tensor, log_sums: torch.Tensor, out: torch.Tensor) -> None:
    """Merge attention `[splits, B, S, H, Dv]` over the keys of each split into `out`, by log2 of their softmax sums."""
    splits, queries, value_dim = len(parts), log_sums[0].numel(), out.shape[-1]
    merge_splits[(queries,)](
        parts, log_sums, out, queries, splits,
        SPLIT_BLOCK=triton.next_power_of_2(splits),
        VALUE_DIM=value_dim, VALUE_BLOCK=_block(value_dim), num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip


def _block(dim: int) -> int:
    """Round a dimension up for matrix products: to a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(dim)))
