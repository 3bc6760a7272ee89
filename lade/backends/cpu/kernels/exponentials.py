"""The exponential function on vectors, and functions based on it, accurate to about one ulp."""

from __future__ import annotations

from typing import Any

from lade.backends.cpu.kernels.instructions import FLOAT, load_long, load_one, next_part
from lade.backends.cpu.kernels.vectors import (
    FLOAT_LANES,
    FLOATS,
    INT_LANES,
    LANES,
    broadcast,
    equal,
    fused,
    load_as_float32,
    splat,
    store_as,
)
from lade.compilation import TeamKernel, inlined, instruction


def _all(value: float) -> Any:
    """Return a constant vector with `value` in every lane."""
    return equal(value, FLOAT_LANES)


def _polynomial(builder: Any, x: Any, factors: tuple[float, ...]) -> Any:
    """Emit a polynomial in x by Horner's scheme, maximum power first."""
    found = _all(factors[0])
    for factor in factors[1:]:
        found = fused(builder, found, x, _all(factor))
    return found


def _power_of_e(builder: Any, x: Any) -> Any:
    """Emit exp(x), accurate to one ulp: 2 ** n times a polynomial of the remainder; 0 below x = -87."""
    shifted = fused(builder, x, _all(1.44269504), _all(1.5 * 2**23))  # its lowest bits are n
    n = builder.fsub(shifted, _all(1.5 * 2**23))
    rest = fused(builder, n, _all(2.12194440e-4), fused(builder, n, _all(-0.693359375), x))
    factors = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
    found = _polynomial(builder, rest, (*factors, 1.0, 1.0))
    exponent = builder.add(builder.bitcast(shifted, INT_LANES), equal(127, INT_LANES))
    power = builder.bitcast(builder.shl(exponent, equal(23, INT_LANES)), FLOAT_LANES)
    small = builder.fcmp_ordered("<", x, _all(-87.0))
    return builder.select(small, _all(0.0), builder.fmul(found, power))


@instruction(FLOATS, FLOATS)
def exp(builder: Any, x: Any) -> Any:
    """Return the exponential of x, for x up to 0."""
    return _power_of_e(builder, x)


@instruction(FLOATS, FLOATS, FLOATS, FLOATS)
def logistic_quotient(builder: Any, x: Any, slope: Any, cubic: Any) -> Any:
    """Return x / (1 + exp(slope * x + cubic * x ** 3)); the exponential overflows to infinity from 88.37 on."""
    square = builder.fmul(x, x)
    square = builder.select(builder.fcmp_ordered("<", square, _all(1e30)), square, _all(1e30))
    exponent = builder.fmul(x, fused(builder, cubic, square, slope))
    large = builder.fcmp_ordered(">", exponent, _all(88.37))
    power = builder.select(large, _all(float("inf")), _power_of_e(builder, exponent))
    return builder.fdiv(x, builder.fadd(power, _all(1.0)))


@instruction(FLOATS, FLOATS, FLOAT)
def capped(builder: Any, x: Any, cap: Any) -> Any:
    """Return cap * tanh(x / cap), by a rational approximation."""
    cap = splat(builder, cap, LANES)
    x = builder.fdiv(x, cap)
    for sign, most in ((">", 7.90531110763549805), ("<", -7.90531110763549805)):  # beyond these, tanh rounds to 1
        x = builder.select(builder.fcmp_ordered(sign, x, _all(most)), _all(most), x)
    square = builder.fmul(x, x)
    odd = (
        *(-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08),
        *(1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03),
    )
    even = (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
    above, below = _polynomial(builder, square, odd), _polynomial(builder, square, even)
    return builder.fmul(cap, builder.fdiv(builder.fmul(x, above), below))


@inlined
def _logistic_product(x: Any, found: Any, kind: Any, slope: Any, cubic: Any, first: Any, last: Any) -> None:
    """Write x / (1 + exp(slope * x + cubic * x ** 3)) to `found`, for the numbers from `first` to before `last`.

    The last vector may overlap the one before it and then writes the same bits again.

    Args:
        x: address of the input; at least `LANES` numbers lie between `first` and `last`.
        found: address of the result, distinct from `x`.
        kind: dtype code of both, float32 or bfloat16.
        slope: coefficient of x in the exponent.
        cubic: coefficient of x ** 3 in the exponent.
        first: index of the first number.
        last: one past the last number.
    """
    item, slopes, cubics = 2 if kind else 4, broadcast(slope), broadcast(cubic)
    for begin in range(first, last, LANES):
        at = item * min(begin, last - LANES)
        numbers = logistic_quotient(load_as_float32(x + at, kind), slopes, cubics)
        store_as(found + at, numbers, kind)


def _logistic_product_on_team(address: Any) -> None:
    """Entry point of `logistic_product`: decode the fields and loop over parts."""
    part, parts, numbers = next_part(address), load_long(address + 8), load_long(address + 56)
    x, found, kind = load_long(address + 16), load_long(address + 24), load_long(address + 32)
    slope, cubic = load_one(address + 40), load_one(address + 48)
    while part < parts:
        first, last = numbers * part // parts, numbers * (part + 1) // parts
        _logistic_product(x, found, kind, slope, cubic, first, last)
        part = next_part(address)


logistic_product = TeamKernel(_logistic_product_on_team)
"""`_logistic_product` as a team kernel.

Its fields are x, found, kind, the coefficients as float32 bits, and the count of numbers.
"""
