"""Products, norms and attention whose sums have an order that depends on a row alone, in Triton.

Every tile has one shape, for 1 to any number of rows: a row stands in it beside others, or beside zeros, and is summed
up by the same instructions. What is split between programs is split at fixed places, and joined from the first to the
last part. The idea is of Thinking Machines' "Defeating nondeterminism in LLM inference" (2025).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def multiply_part(
    x, weight, parts, rows, x_row, w_row,
    FEATURES: tl.constexpr, OUTPUTS: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """One tile of rows by weights, `[ROWS, COLUMNS]`, over one part of the features; see `launch.multiply`."""
    part = tl.program_id(2)
    places, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there, inside = places < rows, columns < OUTPUTS
    x += places[:, None].to(tl.int64) * x_row
    weight += columns[:, None].to(tl.int64) * w_row
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, PART, DEPTH):
        features = part * PART + first + tl.arange(0, DEPTH)
        known = (features < FEATURES)[None, :]
        one = tl.load(x + features[None, :], mask=there[:, None] & known, other=0.0)
        other = tl.load(weight + features[None, :], mask=inside[:, None] & known, other=0.0)
        total = tl.dot(one, tl.trans(other), total, input_precision="ieee")
    out = parts + (part.to(tl.int64) * rows + places[:, None]) * OUTPUTS + columns[None, :]
    tl.store(out, total, mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["rows"])
def add_parts(
    parts, bias, out, rows, PARTS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    """The parts of one row's products, added from the first to the last, and the bias."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < OUTPUTS
    total = tl.load(parts + row * OUTPUTS + columns, mask=inside, other=0.0)
    for part in range(1, PARTS):
        total += tl.load(parts + (part * rows + row) * OUTPUTS + columns, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * OUTPUTS + columns, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def normalise_row(
    x, weight, bias, out, x_row, eps, FEATURES: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """One row by the root of its mean square, with its mean taken off before if `CENTRED`."""
    row, features = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = features < FEATURES
    states = tl.load(x + row * x_row + features, mask=inside, other=0.0).to(tl.float32)
    if CENTRED:
        states = tl.where(inside, states - tl.sum(states) / FEATURES, 0.0)
    states = states / tl.sqrt(tl.sum(states * states) / FEATURES + eps)
    states *= tl.load(weight + features, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        states += tl.load(bias + features, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * FEATURES + features, states.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["positions", "step"])
def attend_part(
    query, key, value, slots, parts, tops, totals,
    q_row, q_head, q_step, k_row, k_head, k_slot, v_row, v_head, v_slot, positions, step, scale, softcap,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SOFTCAP: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    PART: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One query, all heads that share their keys, over one part of the positions; see `launch.attend`."""
    place, part = tl.program_id(0), tl.program_id(1)
    row, head = tl.program_id(2) // KV_HEADS, tl.program_id(2) % KV_HEADS
    members, key_dims, value_dims = tl.arange(0, HEADS), tl.arange(0, KEY_BLOCK), tl.arange(0, VALUE_BLOCK)
    known, key_mask, value_mask = members < GROUP, (key_dims < KEY_DIM)[None, :], (value_dims < VALUE_DIM)[None, :]
    query += row.to(tl.int64) * q_row + (head * GROUP + members)[:, None].to(tl.int64) * q_head + place * q_step
    q = tl.load(query + key_dims[None, :], mask=known[:, None] & key_mask, other=0.0).to(tl.float32)
    key += row.to(tl.int64) * k_row + head.to(tl.int64) * k_head + key_dims[None, :]
    value += row.to(tl.int64) * v_row + head.to(tl.int64) * v_head + value_dims[None, :]
    slots += (row * step + place).to(tl.int64) * positions

    top = tl.full([HEADS], float("-inf"), tl.float32)
    total, found = tl.zeros([HEADS], tl.float32), tl.zeros([HEADS, VALUE_BLOCK], tl.float32)
    for first in range(part * PART, tl.minimum(part * PART + PART, positions), TILE):
        numbers = first + tl.arange(0, TILE)
        slot = tl.load(slots + numbers, mask=numbers < positions, other=-1)
        seen = slot >= 0
        k = tl.load(key + slot[:, None].to(tl.int64) * k_slot, mask=seen[:, None] & key_mask, other=0.0)
        v = tl.load(value + slot[:, None].to(tl.int64) * v_slot, mask=seen[:, None] & value_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision="ieee") * scale
        if SOFTCAP:
            small = tl.exp2(-2 * tl.abs(scores))
            scores = tl.where(scores < 0, -softcap, softcap) * ((1 - small) / (1 + small))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        weights, shrink = tl.exp2(scores - anchor[:, None]), tl.exp2(top - anchor)
        top, total = highest, total * shrink + tl.sum(weights, 1)
        found = tl.dot(weights, v.to(tl.float32), found * shrink[:, None], input_precision="ieee")

    heads = tl.num_programs(2) * GROUP  # of all rows
    at = (part * step + place).to(tl.int64) * heads + tl.program_id(2) * GROUP + members  # in [parts, S, B * H]
    tl.store(tops + at, top, mask=known)
    tl.store(totals + at, total, mask=known)
    tl.store(parts + at[:, None] * VALUE_DIM + value_dims[None, :], found, mask=known[:, None] & value_mask)


@triton.jit(do_not_specialize=["queries", "count"])
def merge_parts(
    parts, tops, totals, sinks, out, queries, count, log2e,
    HEADS: tl.constexpr, SINKS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """What the parts found for one query of one head, joined from the first part to the last.

    A part in which nothing is seen has the weight zero and leaves the others' as it is, so it does not matter how many
    of these a pass has.
    """
    place, dims = tl.program_id(0).to(tl.int64), tl.arange(0, VALUE_BLOCK)
    inside = dims < VALUE_DIM
    top, total, found = float("-inf"), 0.0, tl.zeros([VALUE_BLOCK], tl.float32)
    if SINKS:  # a key without a value
        top, total = tl.load(sinks + place % HEADS).to(tl.float32) * log2e, 1.0
    for part in range(0, count):
        at = part * queries + place
        other = tl.load(tops + at)
        highest = tl.maximum(top, other)
        anchor = tl.where(highest == float("-inf"), 0.0, highest)
        shrink, weight = tl.exp2(top - anchor), tl.exp2(other - anchor)
        values = tl.load(parts + at * VALUE_DIM + dims, mask=inside, other=0.0)
        top, total = highest, total * shrink + tl.load(totals + at) * weight
        found = found * shrink + values * weight
    found = found / tl.where(total == 0, 1.0, total)
    tl.store(out + place * VALUE_DIM + dims, found.to(out.dtype.element_ty), mask=inside)
