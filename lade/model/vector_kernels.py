"""What is compiled for models that round alike in every pass: attention, and numbers times a logistic function.

In attention each query goes through the same instructions whatever is beside it:

- A score is a chain of fused multiply-adds over the head's size, from the first number to the last.
- The largest score is taken over all keys, which rounds nothing.
- Weights, and values times weights, are summed up from the first key to the last. A key that a query does not see has
  the weight zero, which adds nothing: a node of a tree gets the sums of plain decoding.

So what a lane of a vector holds depends on its query and the keys that it sees, on nothing else: not on the lane, the
number of queries, where keys lie, or how the work is cut. It is written in vectors since a compiler that makes vectors
of loops must be free to change the order of sums to do it well; here it has no such freedom, and fused products are
asked for by name.

All of it is in one file, since numba looks at the file alone to see whether its machine code is up to date. Addresses
and strides are in bytes. Left factors lie in *quads*, four rows side by side, `[R / 4, depth, 4]`; products in *tiles*,
four rows of `LANES` columns each, `[R / 4, columns / LANES, 4, LANES]`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils
from numba.extending import models, register_model

from lade.decoding.compilation import CONSTANT, TeamKernel, inlined, instruction

QUAD = 4
LANES = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""Float32 numbers of a vector, or of two where vectors have four: no result depends on it."""
WIDE = 2 * LANES
"""Columns that are multiplied together; rows of a chunk are filled up to a multiple."""
WIDEST = 32
_ROOM = 2 * WIDEST  # numbers that a norm works with
CHUNK = 64
"""Keys that are converted together."""
_WORD, _TILE = 4, 4 * QUAD * LANES  # bytes
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BFLOAT16, _FLOAT16 = 1, 2
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


def kind_of(dtype: torch.dtype) -> int:
    """The number of a dtype."""
    return _KINDS[dtype]


def scratch_size(call: Call) -> int:
    """How many float32 numbers a thread needs to work with, whatever the vectors of the machine code that was kept."""
    size, value_size = (-(-each // WIDEST) * WIDEST for each in (call.size, call.value_size))
    return CHUNK * (max(size, value_size) + size) + call.block * (call.size + call.slots + value_size + 1) + WIDEST


# -------------------------------------------------------------------------------------------------------- instructions


class _Vector(numba.types.Type):
    """So many float32 numbers."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"float32x{lanes}")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: _Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(ir.FloatType(), vector.lanes))  # type: ignore[no-untyped-call]


_types, _utils = cast(Any, numba.types), cast(Any, cgutils)
_V, _VQ = _Vector(LANES), _Vector(QUAD)
_AT, _F, _NONE = numba.int64, numba.float32, numba.void
_CALL = _types.NamedUniTuple(numba.int64, len(Call._fields), Call)
_INT, _FLOATS = ir.IntType(32), ir.VectorType(ir.FloatType(), LANES)
_INTS, _HALVES, _BYTES = (ir.VectorType(ir.IntType(bits), LANES) for bits in (32, 16, 8))


def _read(builder: Any, address: Any, kind: Any) -> Any:
    element = getattr(kind, "element", kind)
    align = element.width // 8 if isinstance(element, ir.IntType) else _WORD
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _write(builder: Any, address: Any, value: Any) -> None:
    align = 2 if value.type == _HALVES else _WORD
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def _all(value: float, kind: Any = _FLOATS) -> Any:
    """A vector of equal numbers."""
    return ir.Constant(kind, [value] * kind.count)


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """The product of the first two, and the third, rounded once."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    function = _utils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{a.type.count}f32")
    return builder.call(function, (a, b, c))


def _polynomial(builder: Any, x: Any, factors: tuple[float, ...]) -> Any:
    """Of x, the highest power's factor first."""
    found = _all(factors[0])
    for factor in factors[1:]:
        found = _fused(builder, found, x, _all(factor))
    return found


@instruction(_V, _AT)
def _load(builder: Any, address: Any) -> Any:
    return _read(builder, address, _FLOATS)


@instruction(_VQ, _AT)
def _load_quad(builder: Any, address: Any) -> Any:
    return _read(builder, address, ir.VectorType(ir.FloatType(), QUAD))


@instruction(_F, _AT)
def _load_one(builder: Any, address: Any) -> Any:
    return _read(builder, address, ir.FloatType())


@instruction(numba.int64, _AT)
def _load_long(builder: Any, address: Any) -> Any:
    return _read(builder, address, ir.IntType(64))


@instruction(numba.int64, _AT)
def _next(builder: Any, address: Any) -> Any:
    """Count an integer up, which no other thread comes between, and return what it was."""
    place = builder.inttoptr(address, ir.IntType(64).as_pointer())
    return builder.atomic_rmw("add", place, ir.Constant(ir.IntType(64), 1), "monotonic")


@instruction(_CALL, _AT)
def _call_at(builder: Any, address: Any) -> Any:
    """The integers of a call, one behind the other."""
    return _read(builder, address, ir.ArrayType(ir.IntType(64), len(Call._fields)))


@instruction(_NONE, _AT, _V)
def _store(builder: Any, address: Any, vector: Any) -> None:
    _write(builder, address, vector)


@instruction(_NONE, _AT, _VQ)
def _store_quad(builder: Any, address: Any, vector: Any) -> None:
    _write(builder, address, vector)


@instruction(_NONE, _AT, _F)
def _store_one(builder: Any, address: Any, number: Any) -> None:
    _write(builder, address, number)


@instruction(_NONE, _AT, _AT, numba.int64)
def _copy(builder: Any, to: Any, address: Any, count: Any) -> None:
    """So many bytes."""
    byte = ir.IntType(8).as_pointer()
    _utils.raw_memcpy(builder, builder.inttoptr(to, byte), builder.inttoptr(address, byte), count, 1)


@instruction(_NONE, _AT, numba.int64)
def _clear(builder: Any, to: Any, count: Any) -> None:
    """So many bytes."""
    _utils.memset(builder, builder.inttoptr(to, ir.IntType(8).as_pointer()), count, 0)


@instruction(_AT, CONSTANT)
def _room(builder: Any, size: Any) -> Any:
    """Address of so many float32 numbers of a function's own, until it returns."""
    place = _utils.alloca_once(builder, ir.ArrayType(ir.FloatType(), size))
    return builder.ptrtoint(place, ir.IntType(64))


@instruction(_V, _F)
def _spread(builder: Any, number: Any) -> Any:
    """The number in all lanes."""
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, first, _all(0, _INTS))


@instruction(_V, _V, _V, _V)
def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _fused(builder, a, b, c)


@instruction(_VQ, _VQ, _VQ)
def _add_quads(builder: Any, a: Any, b: Any) -> Any:
    return builder.fadd(a, b)


@instruction(_V, _V, _V)
def _minus(builder: Any, a: Any, b: Any) -> Any:
    return builder.fsub(a, b)


@instruction(_V, _V, _V)
def _times(builder: Any, a: Any, b: Any) -> Any:
    return builder.fmul(a, b)


@instruction(_V, _V, _V)
def _quotient(builder: Any, a: Any, b: Any) -> Any:
    return builder.fdiv(a, b)


@instruction(_V, _V, _V)
def _highest(builder: Any, a: Any, b: Any) -> Any:
    """The larger of two numbers; the second, if the first is none."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@instruction(_V, _V, _AT)
def _seen(builder: Any, scores: Any, address: Any) -> Any:
    """Scores, minus infinity where a byte is 0."""
    shown = builder.icmp_unsigned("!=", _read(builder, address, _BYTES), _all(0, _BYTES))
    return builder.select(shown, scores, _all(-float("inf")))


@instruction(_V, _AT)
def _of_bfloat16(builder: Any, address: Any) -> Any:
    """The upper halves of float32 numbers."""
    bits = builder.zext(_read(builder, address, _HALVES), _INTS)
    return builder.bitcast(builder.shl(bits, _all(16, _INTS)), _FLOATS)


@instruction(_NONE, _AT, _V)
def _store_bfloat16(builder: Any, address: Any, vector: Any) -> None:
    """Rounded to the nearest, of two as near to the even one."""
    bits = builder.bitcast(vector, _INTS)
    odd = builder.and_(builder.lshr(bits, _all(16, _INTS)), _all(1, _INTS))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _all(0x7FFF, _INTS))), _all(16, _INTS))
    rounded = builder.select(builder.fcmp_ordered("==", vector, vector), rounded, _all(0x7FC0, _INTS))
    _write(builder, address, builder.trunc(rounded, _HALVES))


@instruction(_V, _AT)
def _of_float16(builder: Any, address: Any) -> Any:
    """Its exponents are less by 112; infinity has its largest one."""
    bits = builder.zext(_read(builder, address, _HALVES), _INTS)
    sign = builder.shl(builder.and_(bits, _all(0x8000, _INTS)), _all(16, _INTS))
    rest = builder.shl(builder.and_(bits, _all(0x7FFF, _INTS)), _all(13, _INTS))
    number = builder.bitcast(builder.fmul(builder.bitcast(rest, _FLOATS), _all(2.0**112)), _INTS)
    endless = builder.icmp_unsigned(">=", rest, _all(0x7C00 << 13, _INTS))
    number = builder.select(endless, builder.or_(rest, _all(0x7F800000, _INTS)), number)
    return builder.bitcast(builder.or_(number, sign), _FLOATS)


def _power_of_e(builder: Any, x: Any) -> Any:
    """To a unit in the last place: 2 to the power of n, times a polynomial of what is left over; 0 below 2 ** -126."""
    shifted = _fused(builder, x, _all(1.44269504), _all(1.5 * 2**23))  # whose lowest bits are n
    n = builder.fsub(shifted, _all(1.5 * 2**23))
    rest = _fused(builder, n, _all(2.12194440e-4), _fused(builder, n, _all(-0.693359375), x))
    factors = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
    found = _polynomial(builder, rest, (*factors, 1.0, 1.0))
    exponent = builder.add(builder.bitcast(shifted, _INTS), _all(127, _INTS))
    power = builder.bitcast(builder.shl(exponent, _all(23, _INTS)), _FLOATS)
    small = builder.fcmp_ordered("<", x, _all(-87.0))
    return builder.select(small, _all(0.0), builder.fmul(found, power))


@instruction(_V, _V)
def _exp(builder: Any, x: Any) -> Any:
    """Of numbers up to 0."""
    return _power_of_e(builder, x)


@instruction(_V, _V, _V, _V)
def _over_exp(builder: Any, x: Any, steep: Any, cubic: Any) -> Any:
    """The quotient of x and 1 + exp(steep * x + cubic * x ** 3), of which the last is infinite from 88.37 on."""
    square = builder.fmul(x, x)
    square = builder.select(builder.fcmp_ordered("<", square, _all(1e30)), square, _all(1e30))
    exponent = builder.fmul(x, _fused(builder, cubic, square, steep))
    large = builder.fcmp_ordered(">", exponent, _all(88.37))
    power = builder.select(large, _all(float("inf")), _power_of_e(builder, exponent))
    return builder.fdiv(x, builder.fadd(power, _all(1.0)))


@instruction(_V, _V, _F)
def _capped(builder: Any, x: Any, cap: Any) -> Any:
    """A multiple of tanh, by a quotient of polynomials."""
    first = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), cap, ir.Constant(_INT, 0))
    cap = builder.shuffle_vector(first, first, _all(0, _INTS))
    x = builder.fdiv(x, cap)
    for sign, most in ((">", 7.90531110763549805), ("<", -7.90531110763549805)):  # beyond it is 1
        x = builder.select(builder.fcmp_ordered(sign, x, _all(most)), _all(most), x)
    square = builder.fmul(x, x)
    odd = (
        *(-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08),
        *(1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03),
    )
    even = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
    above, below = _polynomial(builder, square, odd), _polynomial(builder, square, even)
    return builder.fmul(cap, builder.fdiv(builder.fmul(x, above), below))


@instruction(_NONE, _AT, numba.int64, _AT, numba.int64)
def _transpose(builder: Any, address: Any, step: Any, to: Any, to_step: Any) -> None:
    """`LANES` rows of as many numbers: blocks beside the diagonal change places, halves first, single numbers last."""
    rows = [
        _read(builder, builder.add(address, builder.mul(step, ir.Constant(step.type, row))), _FLOATS)
        for row in range(LANES)
    ]
    distance = LANES // 2
    while distance:
        upper = [lane if not lane & distance else lane - distance + LANES for lane in range(LANES)]
        lower = [lane + distance if not lane & distance else lane + LANES for lane in range(LANES)]
        for row in range(LANES):
            if not row & distance:
                pair = rows[row], rows[row + distance]
                rows[row] = builder.shuffle_vector(*pair, ir.Constant(_INTS, upper))
                rows[row + distance] = builder.shuffle_vector(*pair, ir.Constant(_INTS, lower))
        distance //= 2
    for row in range(LANES):
        _write(builder, builder.add(to, builder.mul(to_step, ir.Constant(step.type, row))), rows[row])


@instruction(_NONE, _AT)
def _make_quads(builder: Any, tile: Any) -> None:
    """A tile `[4, LANES]` becomes `[LANES, 4]`, in place."""
    places = [ir.Constant(tile.type, _WORD * LANES * row) for row in range(QUAD)]
    a, b, c, d = (_read(builder, builder.add(tile, place), _FLOATS) for place in places)
    both = ir.VectorType(_INT, 2 * LANES)
    whole = ir.Constant(both, list(range(2 * LANES)))
    ab, cd = builder.shuffle_vector(a, b, whole), builder.shuffle_vector(c, d, whole)
    for number, place in enumerate(places):
        lanes = [row * LANES + number * LANES // QUAD + lane for lane in range(LANES // QUAD) for row in range(QUAD)]
        _write(builder, builder.add(tile, place), builder.shuffle_vector(ab, cd, ir.Constant(_INTS, lanes)))


# ------------------------------------------------------------------------------------------------------------ products


@inlined
def _multiply(left: Any, right: Any, width: Any, columns: Any, depth: Any, tiles: Any) -> None:
    """Add to tiles the products of a quad `[depth, 4]` by so many columns of `[depth, width]`, depth by depth."""
    for column in range(0, columns, WIDE):
        tile = tiles + _WORD * QUAD * column
        a, b = _load(tile), _load(tile + _WORD * LANES)
        c, d = _load(tile + 2 * _WORD * LANES), _load(tile + 3 * _WORD * LANES)
        e, f = _load(tile + _TILE), _load(tile + _TILE + _WORD * LANES)
        g, h = _load(tile + _TILE + 2 * _WORD * LANES), _load(tile + _TILE + 3 * _WORD * LANES)
        for at in range(depth):
            row, quad = right + _WORD * (at * width + column), left + _WORD * QUAD * at
            x, y = _load(row), _load(row + _WORD * LANES)
            p, q = _spread(_load_one(quad)), _spread(_load_one(quad + _WORD))
            r, s = _spread(_load_one(quad + 2 * _WORD)), _spread(_load_one(quad + 3 * _WORD))
            a, b, c, d = _fma(p, x, a), _fma(q, x, b), _fma(r, x, c), _fma(s, x, d)
            e, f, g, h = _fma(p, y, e), _fma(q, y, f), _fma(r, y, g), _fma(s, y, h)
        _store(tile, a)
        _store(tile + _WORD * LANES, b)
        _store(tile + 2 * _WORD * LANES, c)
        _store(tile + 3 * _WORD * LANES, d)
        _store(tile + _TILE, e)
        _store(tile + _TILE + _WORD * LANES, f)
        _store(tile + _TILE + 2 * _WORD * LANES, g)
        _store(tile + _TILE + 3 * _WORD * LANES, h)


@inlined
def _as_floats(address: Any, kind: Any) -> Any:
    """Numbers of a kind, converted."""
    if kind == _BFLOAT16:
        return _of_bfloat16(address)
    if kind == _FLOAT16:
        return _of_float16(address)
    return _load(address)


@inlined
def _store_as(address: Any, numbers: Any, kind: Any) -> None:
    """As numbers of a kind, float32 or bfloat16."""
    if kind == _BFLOAT16:
        _store_bfloat16(address, numbers)
    else:
        _store(address, numbers)


@inlined
def _convert(address: Any, step: Any, kind: Any, count: Any, size: Any, floats: Any, spare: Any) -> Any:
    """So many rows of a cache as float32 `[count, size filled up]`; returns the width.

    What is left over of a row goes by way of `spare`, `LANES` numbers, so that nothing behind it is read.
    """
    item = 2 if kind else 4
    width, whole = -(-size // WIDE) * WIDE, size // LANES * LANES
    for key in range(count):
        row, to = address + key * step, floats + _WORD * width * key
        for at in range(0, whole, LANES):
            _store(to + _WORD * at, _as_floats(row + item * at, kind))
        if whole < size:
            _clear(spare, _WORD * LANES)
            _copy(spare, row + item * whole, item * (size - whole))
            _store(to + _WORD * whole, _as_floats(spare, kind))
    return width


# ------------------------------------------------------------------------------------------------------------ one block


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
        first, last = min(first, _load_long(span)), max(last, _load_long(span + 8))
    return first, last


@inlined
def _take_queries(call: Any, scale: Any, row: Any, head: Any, begin: Any, count: Any, queries: Any, spare: Any) -> None:
    """Scaled, as quads `[R / 4, D, 4]`; what is written behind the last of them is free to be written to."""
    item, whole, scales = 2 if call.query_kind else 4, call.size // LANES * LANES, _spread(scale)
    for first in range(0, count, QUAD):
        for at in range(0, call.size, LANES):
            tile = queries + _WORD * (first * call.size + QUAD * at)
            for place in range(QUAD):
                token, member = _place(call, begin, count, first + place)
                query = call.query + row * call.query_row + (head * call.group + member) * call.query_head
                numbers = query + token * call.query_step + item * at
                if at == whole:
                    _clear(spare, _WORD * LANES)
                    _copy(spare, numbers, item * (call.size - whole))
                    numbers = spare
                _store(tile + _WORD * LANES * place, _times(scales, _as_floats(numbers, call.query_kind)))
            _make_quads(tile)


@inlined
def _score(call: Any, keys: Any, queries: Any, quads: Any, count: Any, tiles: Any, floats: Any, spare: Any) -> None:
    """Scores of as many keys, into tiles `[R / 4, slots / LANES, 4, LANES]`."""
    turned = floats + _WORD * CHUNK * -(-max(call.size, call.value_size) // WIDE) * WIDE
    for first in range(0, count, CHUNK):
        some = min(CHUNK, count - first)
        width = _convert(keys + first * call.key_step, call.key_step, call.key_kind, some, call.size, floats, spare)
        for key in range(0, some, LANES):
            for at in range(0, call.size, LANES):
                block = floats + _WORD * (key * width + at)
                _transpose(block, _WORD * width, turned + _WORD * (at * CHUNK + key), _WORD * CHUNK)
        columns = -(-some // WIDE) * WIDE
        for quad in range(quads):
            to = tiles + _WORD * QUAD * (quad * call.slots + first)
            _clear(to, _WORD * QUAD * columns)
            _multiply(queries + _WORD * QUAD * quad * call.size, turned, CHUNK, columns, call.size, to)


@inlined
def _top(scores: Any, count: Any, allowed: Any, cap: Any, spare: Any) -> Any:
    """Cap and hide a row's scores in place; returns the highest, or the least number if none is seen."""
    best = _spread(_LEAST)
    for key in range(0, count, LANES):
        at, shown = scores + _WORD * QUAD * key, allowed + key
        if key + LANES > count:
            _clear(spare, LANES)
            _copy(spare, shown, count - key)
            shown = spare
        found = _load(at)
        if cap > 0:
            found = _capped(found, cap)
        found = _seen(found, shown)
        _store(at, found)
        best = _highest(found, best)
    _store(spare, best)
    top = _load_one(spare)
    for lane in range(1, LANES):
        top = max(top, _load_one(spare + _WORD * lane))
    return top


@inlined
def _weigh(tiles: Any, count: Any, tops: Any, totals: Any) -> None:
    """Make of a quad's scores their weights, `[keys, 4]`, and add these to `totals`, one key after another."""
    total = _load_quad(totals)
    for key in range(0, count, LANES):
        tile = tiles + _WORD * QUAD * key
        for row in range(QUAD):
            at = tile + _WORD * LANES * row
            _store(at, _exp(_minus(_load(at), _spread(_load_one(tops + _WORD * row)))))
        _make_quads(tile)
        for lane in range(LANES):
            total = _add_quads(total, _load_quad(tile + _WORD * QUAD * lane))
    _store_quad(totals, total)


@inlined
def _sum_up(call: Any, values: Any, tiles: Any, quads: Any, count: Any, sums: Any, floats: Any, spare: Any) -> None:
    """Weighted values, into tiles `[R / 4, Dv / LANES, 4, LANES]`."""
    width = -(-call.value_size // WIDE) * WIDE
    _clear(sums, _WORD * QUAD * quads * width)
    for first in range(0, count, CHUNK):
        some = min(CHUNK, count - first)
        of_chunk = values + first * call.value_step
        _convert(of_chunk, call.value_step, call.value_kind, some, call.value_size, floats, spare)
        for quad in range(quads):
            weights = tiles + _WORD * QUAD * (quad * call.slots + first)
            _multiply(weights, floats, width, width, some, sums + _WORD * QUAD * quad * width)


@inlined
def _give_out(call: Any, row: Any, head: Any, begin: Any, count: Any, sums: Any, spare: Any) -> None:
    """Divide by the sums of weights, and put what comes of it in its place."""
    item, kind = 2 if call.out_kind else 4, call.out_kind
    width, whole = -(-call.value_size // WIDE) * WIDE, call.value_size // LANES * LANES
    for at in range(count):
        token, member = _place(call, begin, count, at)
        number = ((row * call.step + token) * call.heads + head) * call.group + member
        out = call.out + item * number * call.value_size
        found = sums + _WORD * (at // QUAD * QUAD * width + at % QUAD * LANES)
        total = _load_one(sums + _WORD * (call.block * width + at))
        divisor = _spread(total if total != 0 else np.float32(1))
        for place in range(0, whole, LANES):
            _store_as(out + item * place, _quotient(_load(found + _WORD * QUAD * place), divisor), kind)
        if whole < call.value_size:
            _store_as(spare, _quotient(_load(found + _WORD * QUAD * whole), divisor), kind)
            _copy(out + item * whole, spare, item * (call.value_size - whole))


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
    spare, tops = scratch, scratch + _WORD * LANES
    floats = tops + _WORD * LANES
    queries = floats + _WORD * CHUNK * (max(size, value_size) + size)
    tiles = queries + _WORD * call.block * call.size
    sums = tiles + _WORD * call.block * call.slots
    totals = sums + _WORD * call.block * value_size
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
            scores = tiles + _WORD * QUAD * quad * call.slots
            for at in range(QUAD):
                token, member = _place(call, begin, count, QUAD * quad + at)
                allowed = call.allowed + row * call.allowed_row + token * call.allowed_step + first
                top = _top(scores + _WORD * LANES * at, last - first, allowed, cap, spare)
                total = np.float32(0)
                if call.sinks:
                    sink = _load_one(call.sinks + _WORD * (head * call.group + member))
                    top = max(top, sink)
                    _store(spare, _exp(_spread(sink - top)))
                    total = _load_one(spare)
                _store_one(tops + _WORD * at, top)
                _store_one(totals + _WORD * (QUAD * quad + at), total)
            _weigh(scores, last - first, tops, totals + _WORD * QUAD * quad)
        _sum_up(call, values, tiles, quads, last - first, sums, floats, spare)
        _give_out(call, row, head, begin, count, sums, spare)


def _attend_in_team(address: Any) -> None:
    """See `attend`."""
    part, parts = _next(address), _load_long(address + 8)
    scratch, size = _load_long(address + 16), _load_long(address + 24)
    scale, cap, call = _load_one(address + 32), _load_one(address + 40), _call_at(address + 48)
    while part < parts:
        _attend(call, scale, cap, scratch + _WORD * size * part, part, parts)
        part = _next(address)


attend = TeamKernel(_attend_in_team)
"""Attention by a team of threads, see `worker_threads`: its fields are the address of what `scratch_size` says for each
part and that number, the scale and the cap in bits of float32, and a `Call`."""


# ------------------------------------------------------------------------------------------------------------ logistic


@inlined
def _weigh_by_logistic(x: Any, found: Any, kind: Any, steep: Any, cubic: Any, first: Any, last: Any) -> None:
    """Fill in `found`, x over 1 + exp(steep * x + cubic * x ** 3), from number `first` to the one before `last`.

    The last vector may begin before the end of the one before it, and writes the same bits once more.

    Args:
        x: address of numbers, at least `LANES` from `first` to `last`.
        found: address of what becomes of them, not that of x.
        kind: of both, float32 or bfloat16.
        steep: see above.
        cubic: see above.
        first: of the numbers.
        last: of them, and one.
    """
    item, steeps, cubics = 2 if kind else 4, _spread(steep), _spread(cubic)
    for begin in range(first, last, LANES):
        at = item * min(begin, last - LANES)
        numbers = _over_exp(_as_floats(x + at, kind), steeps, cubics)
        _store_as(found + at, numbers, kind)


def _weigh_in_team(address: Any) -> None:
    """See `weigh_by_logistic`."""
    part, parts, numbers = _next(address), _load_long(address + 8), _load_long(address + 56)
    x, found, kind = _load_long(address + 16), _load_long(address + 24), _load_long(address + 32)
    steep, cubic = _load_one(address + 40), _load_one(address + 48)
    while part < parts:
        first, last = numbers * part // parts, numbers * (part + 1) // parts
        _weigh_by_logistic(x, found, kind, steep, cubic, first, last)
        part = _next(address)


weigh_by_logistic = TeamKernel(_weigh_in_team)
"""`_weigh_by_logistic` by a team of threads: its fields are the arguments, factors in bits of float32, and how many
numbers there are."""
# ---------------------------------------------------------------------------------------------------------------- norms


@inlined
def _sum_of_squares(row: Any, kind: Any, columns: Any, sums: Any, spare: Any) -> Any:
    """Of a row's numbers: `WIDEST` partial sums, so that no result depends on `LANES`, added up in order."""
    item, whole = 2 if kind else 4, columns // LANES * LANES
    _clear(sums, _WORD * WIDEST)
    for at in range(0, columns, LANES):
        place = row + item * at
        if at == whole:
            _clear(spare, _WORD * LANES)
            _copy(spare, place, item * (columns - whole))
            place = spare
        numbers, partial = _as_floats(place, kind), sums + _WORD * (at % WIDEST)
        _store(partial, _fma(numbers, numbers, _load(partial)))
    total = np.float32(0)
    for lane in range(WIDEST):
        total += _load_one(sums + _WORD * lane)
    return total


@inlined
def _as_rounded(numbers: Any, kind: Any, spare: Any) -> Any:
    """Numbers as those of a kind, float32 or bfloat16."""
    if kind == _BFLOAT16:
        _store_bfloat16(spare, numbers)
        return _of_bfloat16(spare)
    return numbers


@inlined
def _scaled(numbers: Any, weight: Any, factor: Any, more: Any, kind: Any, rounded: Any, spare: Any) -> Any:
    """Numbers times a factor, rounded there or not, and then times weights, to which something is added before."""
    numbers = _fma(numbers, factor, _spread(np.float32(0)))
    if rounded:
        numbers = _as_rounded(numbers, kind, spare)
    weights = _fma(_as_floats(weight, kind), _spread(np.float32(1)), more)
    return _fma(numbers, weights, _spread(np.float32(0)))


@inlined
def _normalise(
    x: Any, weight: Any, found: Any, kind: Any, columns: Any, norm: Any, sums: Any, first: Any, last: Any
) -> None:
    """Divide each row by the root of the mean of its squares, and multiply it by the weights.

    Args:
        x: address of rows of numbers, `[R, columns]`.
        weight: `[columns]`.
        found: address of what becomes of the rows, not that of x.
        kind: of all three, float32 or bfloat16.
        columns: at least `LANES`.
        norm: what is added to the mean, what is added to the weights, and whether (1) or not (0) numbers are rounded
            before they are multiplied by the weights.
        sums: address of twice `WIDEST` float32 numbers to work with.
        first: of the rows.
        last: of them, and one.
    """
    item, spare = 2 if kind else 4, sums + _WORD * WIDEST
    epsilon, more, rounded = norm
    for row in range(first, last):
        begin, to = x + item * columns * row, found + item * columns * row
        total = _sum_of_squares(begin, kind, columns, sums, spare)
        factor = _spread(np.float32(1) / np.sqrt(total / np.float32(columns) + epsilon))
        for at in range(0, columns, LANES):
            place = item * min(at, columns - LANES)
            numbers = _as_floats(begin + place, kind)
            numbers = _scaled(numbers, weight + place, factor, _spread(more), kind, rounded, spare)
            _store_as(to + place, numbers, kind)


def _normalise_in_team(address: Any) -> None:
    """See `normalise`."""
    part, parts, rows = _next(address), _load_long(address + 8), _load_long(address + 56)
    x, weight, found = _load_long(address + 16), _load_long(address + 24), _load_long(address + 32)
    kind, columns = _load_long(address + 40), _load_long(address + 48)
    norm, sums = (_load_one(address + 64), _load_one(address + 72), _load_long(address + 80)), _room(_ROOM)
    while part < parts:
        first, last = rows * part // parts, rows * (part + 1) // parts
        _normalise(x, weight, found, kind, columns, norm, sums, first, last)
        part = _next(address)


normalise = TeamKernel(_normalise_in_team)
"""`_normalise` by a team of threads: its fields are the addresses and the kind, how many columns and rows there are,
two numbers of the norm in bits of float32 and the third as it is."""
