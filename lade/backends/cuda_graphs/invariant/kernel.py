"""Attention in tiles at fixed positions, in Triton: a query's bits depend on the keys on its path alone.

The keys on a query's path are numbered by their positions, 0 to its own, wherever they lie in the cache. 64 of them are
a tile, two tiles a span; both begin at multiples of their size.

    position    0 ..... 63 | 64 .... 127 || 128 ... 191 | 192 ... 255 || 256 ... 319 | ...
    tile        one product of 16 queries and 64 keys: maximum, sum and weighted values
    span        its tiles, in this order || the next span
    result      the spans, in this order

Every tile goes through the same instructions, and what is masked adds zeros, which change no bit. A product gives a row
the same bits beside any other rows. So a program may compute a span for 16 queries that see the same text, or for the
heads of one node of a tree, whose keys it gathers: the bits are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _merged(top, total, found, other_top, other_total, other_found):
    """Merge two results: maxima `[M]`, sums `[M]` and weighted values `[M, D]`; an empty one changes no bit."""
    highest = tl.maximum(top, other_top)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    own, other = tl.exp2(top - anchor), tl.exp2(other_top - anchor)
    return highest, total * own + other_total * other, found * own[:, None] + other_found * other[:, None]


@triton.jit
def _tile(query, k, v, visible, scale):
    """Return the result of queries `[M, D]` for keys and values `[N, D]`, of which they see some, `[M, N]`."""
    scores = tl.where(visible, tl.dot(query, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    top = tl.max(scores, 1)
    weights = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[:, None])
    return top, tl.sum(weights, 1), tl.dot(weights.to(v.dtype), v, input_precision="ieee")


@triton.jit
def _share(base, text_end, step, blocks, text_spans, path_spans, GROUP: tl.constexpr, QUERIES: tl.constexpr):
    """Return whether this program serves any nodes, its span, its node if it serves one, and its queries `[M]`."""
    pid, member = tl.program_id(0), tl.arange(0, QUERIES)
    of_text, other, own_blocks = pid < blocks * text_spans, pid - blocks * text_spans, tl.cdiv(GROUP, QUERIES)
    single = tl.where(of_text, 0, other // path_spans // own_blocks)
    span = tl.where(of_text, base + pid // blocks, text_end + other % path_spans)
    member += tl.where(of_text, pid % blocks, other // path_spans % own_blocks) * QUERIES
    is_own = of_text | (member < GROUP)
    return of_text, span, single, tl.where(is_own, single * GROUP + member, step * GROUP)


@triton.jit(do_not_specialize=[
    "k_row", "k_head", "v_row", "v_head", "step", "blocks", "text_spans", "path_spans", "spans", "width", "window",
])  # fmt: skip
def attend_span(
    query, key, value, parts, tops, totals, positions, starts, shifts, bases, paths,
    k_row, k_head, v_row, v_head, step, blocks, text_spans, path_spans, spans, width, window, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Compute one span for 16 queries of one KV head and row; see `attention.attend`.

    The first programs serve queries of any nodes, for spans of the text; the others those of one node, for later spans.
    """
    row, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    start, shift, base = tl.load(starts + row), tl.load(shifts + row), tl.load(bases + row) // (KEYS * TILES)
    text_end = tl.maximum(start // (KEYS * TILES), base)  # the first span that is not text alone
    of_text, span, single, place = _share(base, text_end, step, blocks, text_spans, path_spans, GROUP, QUERIES)
    node, member, valid = place // GROUP, head * GROUP + place % GROUP, place < step * GROUP
    position = tl.load(positions + row * step + node, mask=valid, other=-1)  # [M]
    earliest = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    begin, end = span * (KEYS * TILES), (span + 1) * (KEYS * TILES)
    is_needed = (tl.max(position) >= begin) & (tl.min(tl.where(valid, earliest, 2**30)) < end)
    if is_needed & ((span < text_end) == of_text) & (span - base < spans):
        dims = tl.arange(0, BLOCK)[None, :]
        inside, latest = dims < DIM, tl.max(position)
        places_out = (row.to(tl.int64) * step + node) * (KV_HEADS * GROUP) + member  # in [B, S, H]
        q = tl.load(query + places_out[:, None] * DIM + dims, mask=valid[:, None] & inside, other=0.0)
        keys = key + (row.to(tl.int64) * k_row + head.to(tl.int64) * k_head) * DIM + dims
        values = value + (row.to(tl.int64) * v_row + head.to(tl.int64) * v_head) * DIM + dims
        path = paths + (row.to(tl.int64) * step + single) * width
        top = tl.full([QUERIES], float("-inf"), tl.float32)
        total, found = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, BLOCK], tl.float32)
        for tile in range(0, TILES):
            at = begin + tile * KEYS + tl.arange(0, KEYS)  # [N], positions of the keys
            gathered = tl.load(path + at - start, mask=(at >= start) & (at - start < width), other=-1)
            slots = tl.where(at >= start, gathered, at + shift)
            there = (slots >= 0) & (at <= latest)
            k = tl.load(keys + slots[:, None] * DIM, mask=there[:, None] & inside, other=0.0)
            v = tl.load(values + slots[:, None] * DIM, mask=there[:, None] & inside, other=0.0)
            visible = there[None, :] & (at[None, :] <= position[:, None]) & (at[None, :] >= earliest[:, None])
            tile_top, tile_total, tile_found = _tile(q, k, v, visible, scale)
            top, total, found = _merged(top, total, found, tile_top, tile_total, tile_found)
        own = places_out + (span - base).to(tl.int64) * (tl.num_programs(1) // KV_HEADS) * step * (KV_HEADS * GROUP)
        tl.store(tops + own, top, mask=valid)
        tl.store(totals + own, total, mask=valid)
        tl.store(parts + own[:, None] * DIM + dims, found, mask=valid[:, None] & inside)


@triton.jit(do_not_specialize=["heads", "step", "queries", "spans", "window"])
def merge_spans(
    parts, tops, totals, out, positions, bases, heads, step, queries, spans, window,
    DIM: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Merge the spans that one query sees, in order."""
    place = tl.program_id(0).to(tl.int64)
    token = place // heads
    position, base = tl.load(positions + token), tl.load(bases + token // step) // SPAN
    earliest = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    dims = tl.arange(0, BLOCK)
    top, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    found = tl.zeros([1, BLOCK], tl.float32)
    for span in range(tl.maximum(earliest // SPAN - base, 0), tl.minimum(position // SPAN - base + 1, spans)):
        at = (span * queries + place) + tl.zeros([1], tl.int64)
        part = tl.load(parts + at[:, None] * DIM + dims[None, :], mask=(dims < DIM)[None, :], other=0.0)
        top, total, found = _merged(top, total, found, tl.load(tops + at), tl.load(totals + at), part)
    found = found / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + place * DIM + dims[None, :], found.to(out.dtype.element_ty), mask=(dims < DIM)[None, :])
