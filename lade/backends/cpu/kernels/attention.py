"""Attention in which each query executes the same instructions whatever its neighbours.

- A score is a chain of fused multiply-adds over the head dimension, first to last.
- The row maximum is taken over all keys, which rounds nothing.
- Softmax weights, and weighted values, are summed from the first key to the last. A masked key has weight zero and adds
  nothing, so a node of a tree gets the sums of plain decoding.

So a lane depends on its query and the keys it sees, on nothing else: not on its lane index, the number of queries, the
position of keys in memory, or how the work is split. Addresses and strides are in bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from lade.backends.cpu.kernels.exponentials import capped, exp
from lade.backends.cpu.kernels.instructions import (
    AT,
    INT,
    LONG,
    NONE,
    clear,
    copy,
    load_long,
    load_one,
    next_part,
    store_one,
)
from lade.backends.cpu.kernels.vectors import (
    BYTE_LANES,
    FLOAT_LANES,
    FLOATS,
    INT_LANES,
    LANES,
    QUAD,
    WIDE,
    WIDEST,
    WORD,
    add_quads,
    broadcast,
    equal,
    fma,
    load,
    load_as_float32,
    load_quad,
    maximum,
    minus,
    product,
    quotient,
    read,
    store,
    store_as,
    store_quad,
    write,
)
from lade.compilation import TeamKernel, inlined, instruction

_TILE = 4 * QUAD * LANES  # bytes


@instruction(NONE, AT, numba.int64, AT, numba.int64)
def transpose(builder: Any, address: Any, step: Any, to: Any, to_step: Any) -> None:
    """Transpose a `[LANES, LANES]` block: swap off-diagonal blocks, halves first, single numbers last."""
    rows = [
        read(builder, builder.add(address, builder.mul(step, ir.Constant(step.type, row))), FLOAT_LANES)
        for row in range(LANES)
    ]
    distance = LANES // 2
    while distance:
        upper = [lane if not lane & distance else lane - distance + LANES for lane in range(LANES)]
        lower = [lane + distance if not lane & distance else lane + LANES for lane in range(LANES)]
        for row in range(LANES):
            if not row & distance:
                pair = rows[row], rows[row + distance]
                rows[row] = builder.shuffle_vector(*pair, ir.Constant(INT_LANES, upper))
                rows[row + distance] = builder.shuffle_vector(*pair, ir.Constant(INT_LANES, lower))
        distance //= 2
    for row in range(LANES):
        write(builder, builder.add(to, builder.mul(to_step, ir.Constant(step.type, row))), rows[row])


@instruction(NONE, AT)
def make_quads(builder: Any, tile: Any) -> None:
    """Transpose a tile `[4, LANES]` to `[LANES, 4]` in place."""
    places = [ir.Constant(tile.type, WORD * LANES * row) for row in range(QUAD)]
    a, b, c, d = (read(builder, builder.add(tile, place), FLOAT_LANES) for place in places)
    both = ir.VectorType(INT, 2 * LANES)
    whole = ir.Constant(both, list(range(2 * LANES)))
    ab, cd = builder.shuffle_vector(a, b, whole), builder.shuffle_vector(c, d, whole)
    for number, place in enumerate(places):
        lanes = [row * LANES + number * LANES // QUAD + lane for lane in range(LANES // QUAD) for row in range(QUAD)]
        write(builder, builder.add(tile, place), builder.shuffle_vector(ab, cd, ir.Constant(INT_LANES, lanes)))


@inlined
def multiply(left: Any, right: Any, width: Any, columns: Any, depth: Any, tiles: Any) -> None:
    """Accumulate a quad `[depth, 4]` times `columns` columns of `[depth, width]` into tiles."""
    for column in range(0, columns, WIDE):
        tile = tiles + WORD * QUAD * column
        a, b = load(tile), load(tile + WORD * LANES)
        c, d = load(tile + 2 * WORD * LANES), load(tile + 3 * WORD * LANES)
        e, f = load(tile + _TILE), load(tile + _TILE + WORD * LANES)
        g, h = load(tile + _TILE + 2 * WORD * LANES), load(tile + _TILE + 3 * WORD * LANES)
        for at in range(depth):
            row, quad = right + WORD * (at * width + column), left + WORD * QUAD * at
            x, y = load(row), load(row + WORD * LANES)
            p, q = broadcast(load_one(quad)), broadcast(load_one(quad + WORD))
            r, s = broadcast(load_one(quad + 2 * WORD)), broadcast(load_one(quad + 3 * WORD))
            a, b, c, d = fma(p, x, a), fma(q, x, b), fma(r, x, c), fma(s, x, d)
            e, f, g, h = fma(p, y, e), fma(q, y, f), fma(r, y, g), fma(s, y, h)
        store(tile, a)
        store(tile + WORD * LANES, b)
        store(tile + 2 * WORD * LANES, c)
        store(tile + 3 * WORD * LANES, d)
        store(tile + _TILE, e)
        store(tile + _TILE + WORD * LANES, f)
        store(tile + _TILE + 2 * WORD * LANES, g)
        store(tile + _TILE + 3 * WORD * LANES, h)


@inlined
def convert(address: Any, step: Any, kind: Any, count: Any, size: Any, floats: Any, spare: Any) -> Any:
    """Convert `count` rows of a cache to float32 `[count, padded size]`; return the padded width.

    The remainder of a row goes through `spare`, `LANES` numbers, so that nothing past it is read.
    """
    item = 2 if kind else 4
    width, whole = -(-size // WIDE) * WIDE, size // LANES * LANES
    for key in range(count):
        row, to = address + key * step, floats + WORD * width * key
        for at in range(0, whole, LANES):
            store(to + WORD * at, load_as_float32(row + item * at, kind))
        if whole < size:
            clear(spare, WORD * LANES)
            copy(spare, row + item * whole, item * (size - whole))
            store(to + WORD * whole, load_as_float32(spare, kind))
    return width


CHUNK = 64
"""Keys converted to float32 at a time."""
_LEAST = np.finfo(np.float32).min


class AttentionCall(NamedTuple):
    """Arguments of an attention call, all integers; R is S times the query heads per KV head.

    Attributes:
        query: address of the queries, `[B, H, S, D]`.
        query_row, query_head, query_step: strides of the queries.
        query_kind: dtype code of the queries, see `dtype_code`.
        key: address of the keys, `[B, Hkv, K, D]`.
        key_row, key_head, key_step: strides of the keys.
        key_kind: dtype code of the keys.
        value: address of the values, `[B, Hkv, K, Dv]`.
        value_row, value_head, value_step: strides of the values.
        value_kind: dtype code of the values.
        allowed: address of the mask, `[B, S, K]` bytes, nonzero where a query sees a key.
        allowed_row, allowed_step: strides of the mask.
        spans: address of the spans, `[B, S, 2]` int64, contiguous: first key that a query sees, and one past its last.
        sinks: address of the attention sinks, `[H]` float32; 0 if there are none.
        out: address of the result, `[B, S, H, Dv]`, contiguous.
        out_kind: dtype code of the result, float32 or bfloat16.
        rows, heads, group, step, size, value_size: B, Hkv, H / Hkv, S, D, Dv.
        block: how many of the R rows make one work item, a multiple of `QUAD`.
        blocks: number of work items that R is split into.
        slots: K, padded to a multiple of `CHUNK`.
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


def scratch_size(call: AttentionCall) -> int:
    """Return the float32 numbers of scratch memory per thread; an upper bound for every vector width."""
    size, value_size = (-(-each // WIDEST) * WIDEST for each in (call.size, call.value_size))
    return CHUNK * (max(size, value_size) + size) + call.block * (call.size + call.slots + value_size + 1) + WIDEST


_CALL = cast(Any, numba.types).NamedUniTuple(numba.int64, len(AttentionCall._fields), AttentionCall)


@instruction(_CALL, AT)
def _call_at(builder: Any, address: Any) -> Any:
    """Load the arguments of a call from consecutive integers."""
    return read(builder, address, ir.ArrayType(LONG, len(AttentionCall._fields)))


@instruction(FLOATS, FLOATS, AT)
def _seen(builder: Any, scores: Any, address: Any) -> Any:
    """Return scores with minus infinity where the mask byte is 0."""
    shown = builder.icmp_unsigned("!=", read(builder, address, BYTE_LANES), equal(0, BYTE_LANES))
    return builder.select(shown, scores, equal(-float("inf"), FLOAT_LANES))


@inlined
def _token_and_head(call: Any, begin: Any, count: Any, at: Any) -> Any:
    """Return token and query head of a row of a block; rows that pad a quad repeat the last one."""
    number = begin + min(at, count - 1)
    return number // call.group, number % call.group


@inlined
def _key_range(call: Any, row: Any, begin: Any, count: Any) -> Any:
    """Return the first key that any query of a block sees, and one past the last."""
    first, last = call.slots, 0
    for token in range(begin // call.group, (begin + count - 1) // call.group + 1):
        span = call.spans + 16 * (row * call.step + token)
        first, last = min(first, load_long(span)), max(last, load_long(span + 8))
    return first, last


@inlined
def _load_queries(call: Any, scale: Any, row: Any, head: Any, begin: Any, count: Any, queries: Any, spare: Any) -> None:
    """Load and scale queries into quads `[R / 4, D, 4]`; padding rows may be overwritten."""
    item, whole, scales = 2 if call.query_kind else 4, call.size // LANES * LANES, broadcast(scale)
    for first in range(0, count, QUAD):
        for at in range(0, call.size, LANES):
            tile = queries + WORD * (first * call.size + QUAD * at)
            for place in range(QUAD):
                token, member = _token_and_head(call, begin, count, first + place)
                query = call.query + row * call.query_row + (head * call.group + member) * call.query_head
                numbers = query + token * call.query_step + item * at
                if at == whole:
                    clear(spare, WORD * LANES)
                    copy(spare, numbers, item * (call.size - whole))
                    numbers = spare
                store(tile + WORD * LANES * place, product(scales, load_as_float32(numbers, call.query_kind)))
            make_quads(tile)


@inlined
def _score(call: Any, keys: Any, queries: Any, quads: Any, count: Any, tiles: Any, floats: Any, spare: Any) -> None:
    """Compute the scores of `count` keys into tiles `[R / 4, slots / LANES, 4, LANES]`."""
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
def _mask_and_max(scores: Any, count: Any, allowed: Any, cap: Any, spare: Any) -> Any:
    """Cap and mask a row's scores in place; return the maximum, or the least float if no key is seen."""
    best = broadcast(_LEAST)
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
        best = maximum(found, best)
    store(spare, best)
    top = load_one(spare)
    for lane in range(1, LANES):
        top = max(top, load_one(spare + WORD * lane))
    return top


@inlined
def _softmax_weights(tiles: Any, count: Any, tops: Any, totals: Any) -> None:
    """Replace a quad's scores by softmax weights, `[keys, 4]`, and add these to `totals` key by key."""
    total = load_quad(totals)
    for key in range(0, count, LANES):
        tile = tiles + WORD * QUAD * key
        for row in range(QUAD):
            at = tile + WORD * LANES * row
            store(at, exp(minus(load(at), broadcast(load_one(tops + WORD * row)))))
        make_quads(tile)
        for lane in range(LANES):
            total = add_quads(total, load_quad(tile + WORD * QUAD * lane))
    store_quad(totals, total)


@inlined
def _weighted_sums(
    call: Any, values: Any, tiles: Any, quads: Any, count: Any, sums: Any, floats: Any, spare: Any
) -> None:
    """Compute weighted values into tiles `[R / 4, Dv / LANES, 4, LANES]`."""
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
def _write_output(call: Any, row: Any, head: Any, begin: Any, count: Any, sums: Any, spare: Any) -> None:
    """Divide by the sums of weights and store the result."""
    item, kind = 2 if call.out_kind else 4, call.out_kind
    width, whole = -(-call.value_size // WIDE) * WIDE, call.value_size // LANES * LANES
    for at in range(count):
        token, member = _token_and_head(call, begin, count, at)
        number = ((row * call.step + token) * call.heads + head) * call.group + member
        out = call.out + item * number * call.value_size
        found = sums + WORD * (at // QUAD * QUAD * width + at % QUAD * LANES)
        total = load_one(sums + WORD * (call.block * width + at))
        divisor = broadcast(total if total != 0 else np.float32(1))
        for place in range(0, whole, LANES):
            store_as(out + item * place, quotient(load(found + WORD * QUAD * place), divisor), kind)
        if whole < call.value_size:
            store_as(spare, quotient(load(found + WORD * QUAD * whole), divisor), kind)
            copy(out + item * whole, spare, item * (call.value_size - whole))


@inlined
def _attend(call: Any, scale: Any, cap: Any, scratch: Any, part: Any, parts: Any) -> None:
    """Process every `parts`-th work item, from item `part` on.

    Args:
        call: the arguments, a `AttentionCall`.
        scale: factor of the scores.
        cap: logit soft cap: scores s become cap * tanh(s / cap); 0 for none.
        scratch: address of `scratch_size` float32 numbers.
        part: index of the first work item.
        parts: stride between work items.
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
        first, last = _key_range(call, row, begin, count)
        keys = call.key + row * call.key_row + head * call.key_head + first * call.key_step
        values = call.value + row * call.value_row + head * call.value_head + first * call.value_step
        _load_queries(call, scale, row, head, begin, count, queries, spare)
        _score(call, keys, queries, quads, last - first, tiles, floats, spare)
        for quad in range(quads):
            scores = tiles + WORD * QUAD * quad * call.slots
            for at in range(QUAD):
                token, member = _token_and_head(call, begin, count, QUAD * quad + at)
                allowed = call.allowed + row * call.allowed_row + token * call.allowed_step + first
                top = _mask_and_max(scores + WORD * LANES * at, last - first, allowed, cap, spare)
                total = np.float32(0)
                if call.sinks:
                    sink = load_one(call.sinks + WORD * (head * call.group + member))
                    top = max(top, sink)
                    store(spare, exp(broadcast(sink - top)))
                    total = load_one(spare)
                store_one(tops + WORD * at, top)
                store_one(totals + WORD * (QUAD * quad + at), total)
            _softmax_weights(scores, last - first, tops, totals + WORD * QUAD * quad)
        _weighted_sums(call, values, tiles, quads, last - first, sums, floats, spare)
        _write_output(call, row, head, begin, count, sums, spare)


def _attend_on_team(address: Any) -> None:
    """Entry point of `attend`: decode the fields and loop over parts."""
    part, parts = next_part(address), load_long(address + 8)
    scratch, size = load_long(address + 16), load_long(address + 24)
    scale, cap, call = load_one(address + 32), load_one(address + 40), _call_at(address + 48)
    while part < parts:
        _attend(call, scale, cap, scratch + WORD * size * part, part, parts)
        part = next_part(address)


attend = TeamKernel(_attend_on_team)
"""Attention as a team kernel, see `worker_threads`.

Its fields are the address of the scratch memory, its size per part in float32 numbers, scale and cap as float32 bits,
and the fields of the call.
"""
