"""Attention in which each query goes through the same instructions whatever is beside it.

- A score is a chain of fused multiply-adds over the head's size, from the first number to the last.
- The largest score is taken over all keys, which rounds nothing.
- Weights, and values times weights, are summed up from the first key to the last. A key that a query does not see has
  the weight zero, which adds nothing: a node of a tree gets the sums of plain decoding.

So what a lane of a vector holds depends on its query and the keys that it sees, on nothing else: not on the lane, the
number of queries, where keys lie, or how the work is cut. Addresses and strides are in bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from lade.backends.cpu.kernels.exponentials import capped, exp
from lade.backends.cpu.kernels.instructions import AT, LONG, clear, copy, load_long, load_one, next_part, store_one
from lade.backends.cpu.kernels.quads import convert, make_quads, multiply, transpose
from lade.backends.cpu.kernels.vector_types import equal
from lade.backends.cpu.kernels.vectors import (
    BYTE_LANES,
    FLOAT_LANES,
    FLOATS,
    LANES,
    QUAD,
    WIDE,
    WIDEST,
    WORD,
    add_quads,
    as_floats,
    highest,
    load,
    load_quad,
    minus,
    product,
    quotient,
    read,
    spread,
    store,
    store_as,
    store_quad,
)
from lade.compilation import TeamKernel, inlined, instruction

CHUNK = 64
"""Keys that are converted together."""
_LEAST = np.finfo(np.float32).min


class Call(NamedTuple):
    """One call, all integers; R is S times the queries of a head of keys.

    Attributes:
        query: where it lies, `[B, H, S, D]`.
        query_row, query_head, query_step: its strides.
        query_kind: its dtype, see `kind_of`.
        key: `[B, Hkv, K, D]`.
        key_row, key_head, key_step: its strides.
        key_kind: its dtype.
        value: `[B, Hkv, K, Dv]`.
        value_row, value_head, value_step: its strides.
        value_kind: its dtype.
        allowed: `[B, S, K]`, bytes, not 0 where a query sees a key.
        allowed_row, allowed_step: its strides.
        spans: `[B, S, 2]` int64, contiguous: the first key that a query sees, and the one behind the last.
        sinks: `[H]` float32; 0 if there are none.
        out: `[B, S, H, Dv]`, contiguous, what becomes of it.
        out_kind: its dtype, float32 or bfloat16.
        rows, heads, group, step, size, value_size: B, Hkv, H / Hkv, S, D, Dv.
        block: of how many of the R rows to make one piece of work, a multiple of `QUAD`.
        blocks: into how many pieces that cuts R.
        slots: K, filled up to a multiple of `CHUNK`.
    """

    query: int
    query_row: int
    query_head: int
    query_step: int
    query_kind: int
    key: int
    key_row: int
    key_head: int
    key_step: int
    key_kind: int
    value: int
    value_row: int
    value_head: int
    value_step: int
    value_kind: int
    allowed: int
    allowed_row: int
    allowed_step: int
    spans: int
    sinks: int
    out: int
    out_kind: int
    rows: int
    heads: int
    group: int
    step: int
    size: int
    value_size: int
    block: int
    blocks: int
    slots: int


def scratch_size(call: Call) -> int:
    """How many float32 numbers a thread needs to work with, whatever the vectors of the machine code that was kept."""
    size, value_size = (-(-each // WIDEST) * WIDEST for each in (call.size, call.value_size))
    return CHUNK * (max(size, value_size) + size) + call.block * (call.size + call.slots + value_size + 1) + WIDEST


_CALL = cast(Any, numba.types).NamedUniTuple(numba.int64, len(Call._fields), Call)


@instruction(_CALL, AT)
def _call_at(builder: Any, address: Any) -> Any:
    """The integers of a call, one behind the other."""
    return read(builder, address, ir.ArrayType(LONG, len(Call._fields)))


@instruction(FLOATS, FLOATS, AT)
def _seen(builder: Any, scores: Any, address: Any) -> Any:
    """Scores, minus infinity where a byte is 0."""
    shown = builder.icmp_unsigned("!=", read(builder, address, BYTE_LANES), equal(0, BYTE_LANES))
    return builder.select(shown, scores, equal(-float("inf"), FLOAT_LANES))


@inlined
def _place(call: Any, begin: Any, count: Any, at: Any) -> Any:
    """The token of a block's row, and which of its queries it is; rows that fill up a quad are copies of the last."""
    number = begin + min(at, count - 1)
    return number // call.group, number % call.group


@inlined
def _span(call: Any, row: Any, begin: Any, count: Any) -> Any:
    """The first key that a query of a block sees, and the one behind the last."""
    first, last = call.slots, 0
    for token in range(begin // call.group, (begin + count - 1) // call.group + 1):
        span = call.spans + 16 * (row * call.step + token)
        first, last = min(first, load_long(span)), max(last, load_long(span + 8))
    return first, last


@inlined
def _take_queries(call: Any, scale: Any, row: Any, head: Any, begin: Any, count: Any, queries: Any, spare: Any) -> None:
    """Scaled, as quads `[R / 4, D, 4]`; what is written behind the last of them is free to be written to."""
    item, whole, scales = 2 if call.query_kind else 4, call.size // LANES * LANES, spread(scale)
    for first in range(0, count, QUAD):
        for at in range(0, call.size, LANES):
            tile = queries + WORD * (first * call.size + QUAD * at)
            for place in range(QUAD):
                token, member = _place(call, begin, count, first + place)
                query = call.query + row * call.query_row + (head * call.group + member) * call.query_head
                numbers = query + token * call.query_step + item * at
                if at == whole:
                    clear(spare, WORD * LANES)
                    copy(spare, numbers, item * (call.size - whole))
                    numbers = spare
                store(tile + WORD * LANES * place, product(scales, as_floats(numbers, call.query_kind)))
            make_quads(tile)


@inlined
def _score(call: Any, keys: Any, queries: Any, quads: Any, count: Any, tiles: Any, floats: Any, spare: Any) -> None:
    """Scores of as many keys, into tiles `[R / 4, slots / LANES, 4, LANES]`."""
    turned = floats + WORD * CHUNK * -(-max(call.size, call.value_size) // WIDE) * WIDE
    for first in range(0, count, CHUNK):
        some = min(CHUNK, count - first)
        width = convert(keys + first * call.key_step, call.key_step, call.key_kind, some, call.size, floats, spare)
        for key in range(0, some, LANES):
            for at in range(0, call.size, LANES):
                block = floats + WORD * (key * width + at)
                transpose(block, WORD * width, turned + WORD * (at * CHUNK + key), WORD * CHUNK)
        columns = -(-some // WIDE) * WIDE
        for quad in range(quads):
            to = tiles + WORD * QUAD * (quad * call.slots + first)
            clear(to, WORD * QUAD * columns)
            multiply(queries + WORD * QUAD * quad * call.size, turned, CHUNK, columns, call.size, to)


@inlined
def _top(scores: Any, count: Any, allowed: Any, cap: Any, spare: Any) -> Any:
    """Cap and hide a row's scores in place; returns the highest, or the least number if none is seen."""
    best = spread(_LEAST)
    for key in range(0, count, LANES):
        at, shown = scores + WORD * QUAD * key, allowed + key
        if key + LANES > count:
            clear(spare, LANES)
            copy(spare, shown, count - key)
            shown = spare
        found = load(at)
        if cap > 0:
            found = capped(found, cap)
        found = _seen(found, shown)
        store(at, found)
        best = highest(found, best)
    store(spare, best)
    top = load_one(spare)
    for lane in range(1, LANES):
        top = max(top, load_one(spare + WORD * lane))
    return top


@inlined
def _weigh(tiles: Any, count: Any, tops: Any, totals: Any) -> None:
    """Make of a quad's scores their weights, `[keys, 4]`, and add these to `totals`, one key after another."""
    total = load_quad(totals)
    for key in range(0, count, LANES):
        tile = tiles + WORD * QUAD * key
        for row in range(QUAD):
            at = tile + WORD * LANES * row
            store(at, exp(minus(load(at), spread(load_one(tops + WORD * row)))))
        make_quads(tile)
        for lane in range(LANES):
            total = add_quads(total, load_quad(tile + WORD * QUAD * lane))
    store_quad(totals, total)


@inlined
def _sum_up(call: Any, values: Any, tiles: Any, quads: Any, count: Any, sums: Any, floats: Any, spare: Any) -> None:
    """Weighted values, into tiles `[R / 4, Dv / LANES, 4, LANES]`."""
    width = -(-call.value_size // WIDE) * WIDE
    clear(sums, WORD * QUAD * quads * width)
    for first in range(0, count, CHUNK):
        some = min(CHUNK, count - first)
        of_chunk = values + first * call.value_step
        convert(of_chunk, call.value_step, call.value_kind, some, call.value_size, floats, spare)
        for quad in range(quads):
            weights = tiles + WORD * QUAD * (quad * call.slots + first)
            multiply(weights, floats, width, width, some, sums + WORD * QUAD * quad * width)


@inlined
def _give_out(call: Any, row: Any, head: Any, begin: Any, count: Any, sums: Any, spare: Any) -> None:
    """Divide by the sums of weights, and put what comes of it in its place."""
    item, kind = 2 if call.out_kind else 4, call.out_kind
    width, whole = -(-call.value_size // WIDE) * WIDE, call.value_size // LANES * LANES
    for at in range(count):
        token, member = _place(call, begin, count, at)
        number = ((row * call.step + token) * call.heads + head) * call.group + member
        out = call.out + item * number * call.value_size
        found = sums + WORD * (at // QUAD * QUAD * width + at % QUAD * LANES)
        total = load_one(sums + WORD * (call.block * width + at))
        divisor = spread(total if total != 0 else np.float32(1))
        for place in range(0, whole, LANES):
            store_as(out + item * place, quotient(load(found + WORD * QUAD * place), divisor), kind)
        if whole < call.value_size:
            store_as(spare, quotient(load(found + WORD * QUAD * whole), divisor), kind)
            copy(out + item * whole, spare, item * (call.value_size - whole))


@inlined
def _attend(call: Any, scale: Any, cap: Any, scratch: Any, part: Any, parts: Any) -> None:
    """Work through every so manieth block, from number `part` on.

    Args:
        call: what to do.
        scale: factor of the scores.
        cap: scores s become cap * tanh(s / cap); 0 for none.
        scratch: address of as many float32 numbers as `scratch_size` says.
        part: of how many.
        parts: how many.
    """
    size, value_size = -(-call.size // WIDE) * WIDE, -(-call.value_size // WIDE) * WIDE
    spare, tops = scratch, scratch + WORD * LANES
    floats = tops + WORD * LANES
    queries = floats + WORD * CHUNK * (max(size, value_size) + size)
    tiles = queries + WORD * call.block * call.size
    sums = tiles + WORD * call.block * call.slots
    totals = sums + WORD * call.block * value_size
    for item in range(part, call.rows * call.heads * call.blocks, parts):
        row, head, begin = item // call.blocks // call.heads, item // call.blocks % call.heads, item % call.blocks
        begin *= call.block
        count = min(call.block, call.group * call.step - begin)
        quads = -(-count // QUAD)
        first, last = _span(call, row, begin, count)
        keys = call.key + row * call.key_row + head * call.key_head + first * call.key_step
        values = call.value + row * call.value_row + head * call.value_head + first * call.value_step
        _take_queries(call, scale, row, head, begin, count, queries, spare)
        _score(call, keys, queries, quads, last - first, tiles, floats, spare)
        for quad in range(quads):
            scores = tiles + WORD * QUAD * quad * call.slots
            for at in range(QUAD):
                token, member = _place(call, begin, count, QUAD * quad + at)
                allowed = call.allowed + row * call.allowed_row + token * call.allowed_step + first
                top = _top(scores + WORD * LANES * at, last - first, allowed, cap, spare)
                total = np.float32(0)
                if call.sinks:
                    sink = load_one(call.sinks + WORD * (head * call.group + member))
                    top = max(top, sink)
                    store(spare, exp(spread(sink - top)))
                    total = load_one(spare)
                store_one(tops + WORD * at, top)
                store_one(totals + WORD * (QUAD * quad + at), total)
            _weigh(scores, last - first, tops, totals + WORD * QUAD * quad)
        _sum_up(call, values, tiles, quads, last - first, sums, floats, spare)
        _give_out(call, row, head, begin, count, sums, spare)


def _attend_in_team(address: Any) -> None:
    """See `attend`."""
    part, parts = next_part(address), load_long(address + 8)
    scratch, size = load_long(address + 16), load_long(address + 24)
    scale, cap, call = load_one(address + 32), load_one(address + 40), _call_at(address + 48)
    while part < parts:
        _attend(call, scale, cap, scratch + WORD * size * part, part, parts)
        part = next_part(address)


attend = TeamKernel(_attend_in_team)
"""Attention by a team of threads, see `worker_threads`: its fields are the address of what `scratch_size` says for each
part and that number, the scale and the cap in bits of float32, and a `Call`."""
