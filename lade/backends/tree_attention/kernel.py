"""Tree attention over a cache with rows of different lengths, in Triton.

A query sees the first `length` slots of its row, which hold cached text, and those nodes of the tree that its ancestor
bits select; nodes are stored from slot `first` on. Visible keys of a row are numbered without the gap:

    slot     0 ............ length |  (other rows' text)  | first ....... first + T
    number   0 ............ length - 1                      length ...... length + T - 1

Slots in the gap are never read. One program computes one tile of queries of one KV head: a tile holds the queries of
all heads that share it, S * group in total, so keys are read once for all. The keys are split evenly between several
programs, as in flash-decoding (Dao, Haziza, Massa, Sizov, 2023), and a second kernel merges their results by the
logarithms of their sums. The softmax is the online one of Milakov and Gimelshein (arXiv 1805.02867), in float32.

Lengths, positions and bits are read on the device, so nothing synchronises, and a captured graph stays valid while they
change. The number of splits is no constant, since each value of a constant is compiled. A non-finite value of a node
reaches only queries that may see that node.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _low(positions, valid, length, reach, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the number of the first key within reach of any query of the tile."""
    earliest = tl.min(tl.where(valid, positions, 2**31 - 1))
    low = length * 0
    if WINDOW:
        low = tl.maximum(earliest - reach + 1, 0)
    if CHUNK:
        low = earliest // reach * reach
    return tl.minimum(low, length)


@triton.jit
def _near(queries, keys, reach, CHUNK: tl.constexpr):
    """Return `[M, N]`, true where keys `[N]` are within reach of queries `[M]`, by position."""
    if CHUNK:
        return queries[:, None] // reach == keys[None, :] // reach
    else:
        return queries[:, None] - keys[None, :] < reach


@triton.jit
def _scores(query, key, scale, softcap, SOFTCAP: tl.constexpr):
    """Return base-2 scores `[M, N]` of queries `[M, D]` and keys `[N, D]`; `attend` has scaled `scale` accordingly."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:
        small = tl.exp2(-2 * tl.abs(scores))
        capped = softcap * (1 - small) / (1 + small)  # softcap * tanh
        scores = tl.where(scores < 0, -capped, capped)
    return scores


@triton.jit
def _seen(scores, visible, top, total, found):
    """Update the online softmax: return weights `[M, N]` of visible keys, and the state rescaled to the new maximum."""
    scores = tl.where(visible, scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    anchor = tl.where(highest == float("-inf"), 0.0, highest)  # -inf while a query has seen nothing
    weights = tl.exp2(scores - anchor[:, None])
    shrink = tl.exp2(top - anchor)
    return weights, highest, total * shrink + tl.sum(weights, 1), found * shrink[:, None]


@triton.jit
def _add_unharmed(found, weights, value, visible):
    """Add weighted values `[N, D]` to `found`; non-finite values become NaN, for queries that see them only.

    Since 0 * inf is NaN, one overflowing branch of a tree would otherwise affect all the others.
    """
    finite = tl.abs(value.to(tl.float32)) < float("inf")
    found = tl.dot(weights.to(value.dtype), tl.where(finite, value, 0.0), found, input_precision="ieee")
    if tl.min(finite.to(tl.int32)) == 0:
        harmful = tl.where(finite, 0.0, 1.0).to(value.dtype)
        harmed = tl.dot(visible.to(value.dtype), harmful, input_precision="ieee") > 0
        found = tl.where(harmed, float("nan"), found)
    return found


@triton.jit
def _text(
    top, total, found, query, position, valid, key, value, key_mask, value_mask, start, end,
    k_slot, v_slot, scale, softcap, reach,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add the text from `start` to `end` to the result; `key` and `value` point to the dimensions of slot 0."""
    for first in range(start, end, KEYS):
        slots = first + tl.arange(0, KEYS)
        there = slots < end
        k = tl.load(key + slots[:, None] * k_slot, mask=there[:, None] & key_mask, other=0.0)
        v = tl.load(value + slots[:, None] * v_slot, mask=there[:, None] & value_mask, other=0.0)
        visible = there[None, :] & valid[:, None]
        if WINDOW or CHUNK:
            visible &= _near(position, slots, reach, CHUNK)
        scores = _scores(query, k, scale, softcap, SOFTCAP)
        weights, top, total, found = _seen(scores, visible, top, total, found)
        found = tl.dot(weights.to(v.dtype), v, found, input_precision="ieee")
    return top, total, found


@triton.jit
def _nodes(
    top, total, found, query, position, valid, key, value, key_mask, value_mask, start, end,
    k_slot, v_slot, scale, softcap, reach, first, node_positions, ancestors,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add the nodes from `start` to `end` to the result; `ancestors` points to the words of each query."""
    for begin in tl.range(start, end, KEYS, num_stages=1):  # trees are small: prefetching is not worth its memory
        nodes = begin + tl.arange(0, KEYS)
        there = nodes < end
        bits = tl.load(ancestors[:, None] + nodes[None, :] // 32, mask=there[None, :] & valid[:, None], other=0)
        visible = (bits >> (nodes[None, :] % 32)) & 1 != 0
        if WINDOW or CHUNK:
            visible &= _near(position, tl.load(node_positions + nodes, mask=there, other=0), reach, CHUNK)
        slots = first + nodes
        k = tl.load(key + slots[:, None] * k_slot, mask=there[:, None] & key_mask, other=0.0)
        v = tl.load(value + slots[:, None] * v_slot, mask=there[:, None] & value_mask, other=0.0)
        scores = _scores(query, k, scale, softcap, SOFTCAP)
        weights, top, total, found = _seen(scores, visible, top, total, found)
        found = _add_unharmed(found, weights, v, visible)
    return top, total, found


@triton.jit
def _sink(sinks, member, valid, split, log2e, SINKS: tl.constexpr, TILE: tl.constexpr):
    """Return the initial maximum and sum of the softmax, `[TILE]` each."""
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    if SINKS:  # a key without a value, counted in the first split
        sink = tl.load(sinks + member, mask=valid, other=0.0).to(tl.float32) * log2e
        top = tl.where(split == 0, sink, top)
        total += tl.where(split == 0, 1.0, 0.0)
    return top, total


@triton.jit(do_not_specialize=["step", "nodes", "words", "reach"])
def attend_tile(
    query, key, value, sinks, out, log_sums,
    lengths, firsts, positions, node_positions, ancestors,
    q_row, q_head, q_step, k_row, k_head, k_slot, v_row, v_head, v_slot,
    step, nodes, words, reach, scale, softcap, log2e,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries of one KV head and row, over one split of their keys; see `launch.attend`."""
    split, row, head = tl.program_id(1), tl.program_id(2) // KV_HEADS, tl.program_id(2) % KV_HEADS
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE], indices into the queries of all heads of the group
    node, member, valid = place // GROUP, head * GROUP + place % GROUP, place < step * GROUP
    key_dims, value_dims = tl.arange(0, KEY_BLOCK)[None, :], tl.arange(0, VALUE_BLOCK)[None, :]
    key_mask, value_mask = key_dims < KEY_DIM, value_dims < VALUE_DIM

    query += row.to(tl.int64) * q_row + member[:, None] * q_head + node[:, None] * q_step + key_dims
    q = tl.load(query, mask=valid[:, None] & key_mask, other=0.0)  # [TILE, D]
    key += row.to(tl.int64) * k_row + head.to(tl.int64) * k_head + key_dims
    value += row.to(tl.int64) * v_row + head.to(tl.int64) * v_head + value_dims
    position = tl.load(positions + row * step + node, mask=valid, other=0)
    length = tl.load(lengths + row)

    low = _low(position, valid, length, reach, WINDOW, CHUNK)
    share = tl.cdiv(tl.cdiv(length + nodes - low, tl.num_programs(1)), KEYS) * KEYS
    start = low + split * share
    end = tl.minimum(start + share, length + nodes)

    top, total = _sink(sinks, member, valid, split, log2e, SINKS, TILE)
    found = tl.zeros([TILE, VALUE_BLOCK], tl.float32)
    top, total, found = _text(
        top, total, found, q, position, valid, key, value, key_mask, value_mask, start, tl.minimum(end, length),
        k_slot, v_slot, scale, softcap, reach, WINDOW, CHUNK, SOFTCAP, KEYS,
    )  # fmt: skip
    top, total, found = _nodes(
        top, total, found, q, position, valid, key, value, key_mask, value_mask,
        tl.maximum(start, length) - length, end - length, k_slot, v_slot, scale, softcap, reach,
        tl.load(firsts + row), node_positions + row * nodes, ancestors + (row * step + node) * words,
        WINDOW, CHUNK, SOFTCAP, KEYS,
    )  # fmt: skip

    whole = tl.where(total == 0, 1.0, total)  # 0 for a query that sees nothing
    found = found / whole[:, None]
    place_out = (row * step + node).to(tl.int64) * (KV_HEADS * GROUP) + member  # in [B, S, H]
    if SPLIT:  # in [splits, B, S, H]
        place_out += split.to(tl.int64) * (tl.num_programs(2) // KV_HEADS) * step * (KV_HEADS * GROUP)
        tl.store(log_sums + place_out, tl.where(total == 0, float("-inf"), top + tl.log2(whole)), mask=valid)
    out += place_out[:, None] * VALUE_DIM + value_dims
    tl.store(out, found.to(out.dtype.element_ty), mask=valid[:, None] & value_mask)


@triton.jit(do_not_specialize=["queries", "number"])
def merge_splits(
    parts, log_sums, out, queries, number,
    SPLIT_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the results of all splits for one query of one head, weighted by the logarithms of their sums."""
    place = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, SPLIT_BLOCK).to(tl.int64), tl.arange(0, VALUE_BLOCK)
    there, inside = splits < number, dims < VALUE_DIM
    sums = tl.load(log_sums + splits * queries + place, mask=there, other=float("-inf"))
    highest = tl.max(sums)
    weights = tl.exp2(sums - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(weights)
    part = tl.load(
        parts + (splits * queries + place)[:, None] * VALUE_DIM + dims[None, :],
        mask=there[:, None] & inside[None, :],
        other=0.0,
    )
    found = tl.sum(part * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + place * VALUE_DIM + dims, found.to(out.dtype.element_ty), mask=inside)
