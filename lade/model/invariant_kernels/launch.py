"""The launch of the kernels: how the work is cut, which no number of rows, queries or keys has a say in."""

from __future__ import annotations

import math

import torch
import triton

from lade.model.invariant_kernels.kernel import add_parts, attend_part, merge_parts, multiply_part, normalise_row

LOG2E = math.log2(math.e)
ROWS, COLUMNS, DEPTH = 16, 64, 64
"""Of a tile of a matrix product: rows, columns, and features at a time."""
FEATURES_OF_PART = 1024
POSITIONS_OF_TILE, POSITIONS_OF_PART = 64, 256
LEAST_HEADS = 16
"""Rows of the tile that the heads of one query make, as matrix products want it."""


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Rows by weights: `[rows, in]` and `[out, in]` to `[rows, out]`, as `torch.nn.functional.linear`.

    Args:
        x: `[rows, in]`, float32, float16 or bfloat16.
        weight: `[out, in]` of the same dtype.
        bias: `[out]`, if there is one.
    """
    x, weight = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, weight))
    (rows, features), outputs = x.shape, len(weight)
    count = triton.cdiv(features, FEATURES_OF_PART)
    out = x.new_empty(rows, outputs)
    parts = x.new_empty(count, rows, outputs, dtype=torch.float32)
    columns = triton.cdiv(outputs, COLUMNS)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        multiply_part[(triton.cdiv(rows, ROWS), columns, count)](
            x, weight, parts, rows, x.stride(0), weight.stride(0),
            FEATURES=features, OUTPUTS=outputs, PART=FEATURES_OF_PART,
            ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH, num_warps=4, num_stages=3,
        )  # fmt: skip
        add_parts[(rows, columns)](
            parts, bias, out, rows, PARTS=count, OUTPUTS=outputs, COLUMNS=COLUMNS, BIAS=bias is not None
        )
    return out


def normalise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    centred: bool = False,
) -> torch.Tensor:
    """The root-mean-square norm of rows, or the layer norm, rounded once at the end.

    Args:
        x: `[rows, features]`.
        weight: `[features]`.
        bias: `[features]`, if there is one.
        eps: added to the mean square.
        centred: take off the mean before, as the layer norm does.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, features = x.shape
    out = x.new_empty(rows, features)
    with torch.cuda.device_of(x):
        normalise_row[(rows,)](
            x, weight, bias, out, x.stride(0), eps,
            FEATURES=features, BLOCK=triton.next_power_of_2(features), CENTRED=centred, BIAS=bias is not None,
        )  # fmt: skip
    return out


def slots_by_position(allowed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Where the keys that each query sees lie: `[B, S, P]` int32, for each position a slot, or -1.

    A query sees at most one key of each position: along its path, the others are of other branches.

    Args:
        allowed: `[B, S, K]` bool, what each query sees.
        positions: `[B, K]` int64, of the keys.
    """
    rows, step, slots = allowed.shape
    places = positions[:, None].clamp(min=0).expand(-1, step, -1)
    numbers = torch.arange(slots, dtype=torch.int32, device=allowed.device).expand(rows, step, -1)
    table = allowed.new_full((rows, step, int(positions.max()) + 1), -1, dtype=torch.int32)
    return table.scatter_reduce_(2, places, numbers.masked_fill(~allowed, -1), "amax")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention whose keys are taken in the order of their positions, in tiles and parts at fixed ones.

    Args:
        query: `[B, H, S, D]`.
        key: `[B, Hkv, K, D]`.
        value: `[B, Hkv, K, Dv]`.
        slots: `[B, S, P]` int32, of `slots_by_position`.
        scale: factor of the scores.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: `[H]`, the score of one more key of each head, which has no value.

    Returns:
        `[B, S, H, Dv]` in the dtype of `query`; 0 where a query sees nothing.
    """
    query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
    rows, heads, step, dim = query.shape
    kv_heads, value_dim, positions = key.shape[1], value.shape[-1], slots.shape[-1]
    count, group = triton.cdiv(positions, POSITIONS_OF_PART), heads // kv_heads
    out = query.new_empty(step, rows, heads, value_dim)
    parts = query.new_empty(count, *out.shape, dtype=torch.float32)
    tops, totals = (parts.new_empty(parts.shape[:-1]) for _ in range(2))
    with torch.cuda.device_of(query):
        attend_part[(step, count, rows * kv_heads)](
            query, key, value, slots.contiguous(), parts, tops, totals,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], positions, step,
            scale * LOG2E / (softcap or 1.0), (softcap or 0.0) * LOG2E,
            KV_HEADS=kv_heads, GROUP=group, SOFTCAP=softcap is not None, KEY_DIM=dim, VALUE_DIM=value_dim,
            KEY_BLOCK=_block(dim), VALUE_BLOCK=_block(value_dim), PART=POSITIONS_OF_PART, TILE=POSITIONS_OF_TILE,
            HEADS=max(LEAST_HEADS, triton.next_power_of_2(group)), num_warps=4, num_stages=2,
        )  # fmt: skip
        merge_parts[(step * rows * heads,)](
            parts, tops, totals, sinks, out, step * rows * heads, count, LOG2E,
            HEADS=heads, SINKS=sinks is not None, VALUE_DIM=value_dim, VALUE_BLOCK=_block(value_dim), num_warps=1,
        )  # fmt: skip
    return out.transpose(0, 1)


def _block(dim: int) -> int:
    """The dimension as matrix products want it: a power of two from 16 on."""
    return max(16, int(triton.next_power_of_2(dim)))
