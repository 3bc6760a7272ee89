"""The exponential function of vectors, and what is made of it, to about a unit in the last place."""

from __future__ import annotations

from typing import Any

from lade.backends.cpu.kernels.instructions import FLOAT
from lade.backends.cpu.kernels.vector_types import equal, spread_out
from lade.backends.cpu.kernels.vectors import FLOAT_LANES, FLOATS, INT_LANES, LANES, fused
from lade.compilation import instruction


def _all(value: float) -> Any:
    """The number in all lanes."""
    return equal(value, FLOAT_LANES)


def _polynomial(builder: Any, x: Any, factors: tuple[float, ...]) -> Any:
    """Of x, the highest power's factor first."""
    found = _all(factors[0])
    for factor in factors[1:]:
        found = fused(builder, found, x, _all(factor))
    return found


def _power_of_e(builder: Any, x: Any) -> Any:
    """To a unit in the last place: 2 to the power of n, times a polynomial of what is left over; 0 below 2 ** -126."""
    shifted = fused(builder, x, _all(1.44269504), _all(1.5 * 2**23))  # whose lowest bits are n
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
    """Of numbers up to 0."""
    return _power_of_e(builder, x)


@instruction(FLOATS, FLOATS, FLOATS, FLOATS)
def over_exp(builder: Any, x: Any, steep: Any, cubic: Any) -> Any:
    """The quotient of x and 1 + exp(steep * x + cubic * x ** 3), of which the last is infinite from 88.37 on."""
    square = builder.fmul(x, x)
    square = builder.select(builder.fcmp_ordered("<", square, _all(1e30)), square, _all(1e30))
    exponent = builder.fmul(x, fused(builder, cubic, square, steep))
    large = builder.fcmp_ordered(">", exponent, _all(88.37))
    power = builder.select(large, _all(float("inf")), _power_of_e(builder, exponent))
    return builder.fdiv(x, builder.fadd(power, _all(1.0)))


@instruction(FLOATS, FLOATS, FLOAT)
def capped(builder: Any, x: Any, cap: Any) -> Any:
    """A multiple of tanh, by a quotient of polynomials."""
    cap = spread_out(builder, cap, LANES)
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
