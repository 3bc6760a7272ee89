"""Attention of an invariant model: where the keys on the paths of its queries are, and the launch of the kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton

from lade.backends.cuda_graphs.fused_kernels import roomy
from lade.backends.cuda_graphs.invariant.kernel import attend_span, merge_spans

QUERIES, KEYS, TILES = 16, 64, 2
SPAN = KEYS * TILES
"""Positions of a span: with fewer, more results of spans are kept; with more, each node gathers more keys."""
MOST_BYTES = 2**28
"""Memory for results of spans, which bounds how many tokens of a row are attended together."""
_EVERYTHING = 2**30


@dataclass(frozen=True)
class Places:
    """Slots of the keys on each query's path, by position; contiguous int32 tensors.

    Below `starts`, position p is in slot p + shift for all queries of a row; from there on `paths` tells.
    """

    positions: torch.Tensor  # [B, S], of the queries
    starts: torch.Tensor  # [B]
    shifts: torch.Tensor  # [B]; slots below 0 do not exist
    bases: torch.Tensor  # [B], multiples of `SPAN`; no query needs keys at positions before
    paths: torch.Tensor  # [B, S, W], slot of the key at position `starts + w`; -1 for none
    text_spans: int  # most spans, from `bases` on, that lie below `starts`
    path_spans: int  # most spans that do not
    window: int = 0  # number of positions that a query sees, its own included; 0 for all

    @classmethod
    def of_text(cls, positions: torch.Tensor, keys: int) -> Places:
        """Return the places of queries `[B, S]` that are the last of `keys` slots, each seeing all before it."""
        shifts = keys - 1 - positions[:, -1]
        bases = (-shifts).clamp(min=0) // SPAN * SPAN
        starts, paths = torch.full_like(shifts, _EVERYTHING), positions[..., None]
        return cls._of(positions, starts, shifts, bases, paths, triton.cdiv(keys + SPAN - 1, SPAN), 0)

    @classmethod
    def of_mask(cls, positions: torch.Tensor, allowed: torch.Tensor) -> Places:
        """Return the places of queries `[B, S]` that see the slots `allowed`, `[B, S, K]` bool.

        A query sees slots in the order of their positions, without gaps, the last one at its own position.
        """
        keys = allowed.shape[-1]
        count, rank = allowed.sum(-1), allowed.cumsum(-1) - 1
        firsts = (positions - count + 1).clamp(min=0)  # [B, S], position of the first key that is seen
        bases = firsts.amin(-1) // SPAN * SPAN
        spans = triton.cdiv(keys + SPAN - 1, SPAN)
        place = (positions - count + 1 - bases[:, None])[..., None] + rank
        paths = _scattered(place, allowed & (place >= 0), torch.arange(keys, device=allowed.device), spans * SPAN)
        return cls._of(positions, bases, torch.zeros_like(bases), bases, paths, 0, spans)

    @classmethod
    def of_trees(
        cls, closure: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor, shifts: torch.Tensor, keys: int
    ) -> Places:
        """Return the places of the nodes of trees.

        Args:
            closure: `[B, S, S]` bool, ancestors of each node, see `StaticInputs`.
            positions: `[B, S]`, as if the text began at position 0.
            lengths: `[B]`, slots of text before each tree.
            shifts: `[B]`, slots minus positions of the text.
            keys: K, slots that a pass reads.
        """
        step = closure.shape[1]
        slots = lengths[:, None, None] + torch.arange(step, device=closure.device)
        paths = _scattered(closure.cumsum(-1) - 1, closure, slots, step)
        bases = (-shifts).clamp(min=0) // SPAN * SPAN
        spans = triton.cdiv(keys + SPAN - 1, SPAN), triton.cdiv(step + SPAN - 1, SPAN)
        return cls._of(positions - shifts[:, None], lengths - shifts, shifts, bases, paths, *spans)

    @classmethod
    def _of(cls, *parts: Any) -> Places:
        made: list[Any] = [each.int().contiguous() if isinstance(each, torch.Tensor) else each for each in parts]
        return cls(*made)

    @property
    def spans(self) -> int:
        """Most spans that the queries of a row need."""
        return max(self.text_spans, self.path_spans)

    def within(self, window: int | None) -> Places:
        """Return the places of a layer with a window."""
        return replace(self, window=window or 0)

    def piece(self, first: int, last: int) -> Places:
        """Return the places of some of the queries."""
        paths = self.paths[:, first:last].contiguous()
        return replace(self, positions=self.positions[:, first:last].contiguous(), paths=paths)


def _scattered(place: torch.Tensor, there: torch.Tensor, slots: torch.Tensor, width: int) -> torch.Tensor:
    """Return `[B, S, width]`, the slot at each place; -1 where there is none."""
    paths = place.new_full((*place.shape[:2], width + 1), -1)
    place = torch.where(there & (place < width), place, width)
    return paths.scatter_(2, place, slots.expand_as(place))[..., :width]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Places, *, scale: float
) -> torch.Tensor:
    """Compute attention, `[B, S, H, D]` in the dtype of `query`.

    Args:
        query: contiguous `[B, S, H, D]`, float32, float16 or bfloat16.
        key: `[B, Hkv, K, D]` in the same dtype; H / Hkv consecutive query heads share a KV head.
        value: like `key`.
        places: where the keys are.
        scale: factor of the scores.
    """
    rows, step, heads, dim = query.shape
    key, value = (each if each.stride()[2:] == (dim, 1) else each.contiguous() for each in (key, value))
    out = roomy(query, rows * step, heads, dim).view_as(query)
    bytes_each = 4 * places.spans * rows * heads * dim
    most = max(1, MOST_BYTES // bytes_each // QUERIES) * QUERIES
    if step <= most:
        _attend(query, key, value, places, scale, out)
        return out
    for first in range(0, step, most):
        piece = query[:, first : first + most].contiguous()
        found = torch.empty_like(piece)
        _attend(piece, key, value, places.piece(first, first + most), scale, found)
        out[:, first : first + most] = found
    return out


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Places, scale: float, out: torch.Tensor
) -> None:
    rows, step, heads, dim = query.shape
    kv_heads, block = key.shape[1], max(16, triton.next_power_of_2(dim))
    group, of_dim = heads // kv_heads, {"DIM": dim, "BLOCK": block}
    parts = query.new_empty(places.spans, rows, step, heads, dim, dtype=torch.float32)
    tops, totals = query.new_empty(2, places.spans, rows, step, heads, dtype=torch.float32)
    strides = [stride // dim for each in (key, value) for stride in each.stride()[:2]]
    blocks = triton.cdiv(step * group, QUERIES)
    programs = blocks * places.text_spans + step * triton.cdiv(group, QUERIES) * places.path_spans
    with torch.cuda.device_of(query):  # Triton launches on the current device
        attend_span[(programs, rows * kv_heads)](
            query, key, value, parts, tops, totals,
            places.positions, places.starts, places.shifts, places.bases, places.paths,
            *strides, step, blocks, places.text_spans, max(1, places.path_spans), places.spans, places.paths.shape[2],
            places.window, scale * math.log2(math.e), KV_HEADS=kv_heads, GROUP=group, **of_dim,
            QUERIES=QUERIES, KEYS=KEYS, TILES=TILES, num_warps=4, enable_fp_fusion=False,
            num_stages=1 if block * query.element_size() > 256 else 2,
        )  # fmt: skip
        merge_spans[(rows * step * heads,)](
            parts, tops, totals, out, places.positions, places.bases, heads, step, rows * step * heads, places.spans,
            places.window, **of_dim, SPAN=SPAN, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
