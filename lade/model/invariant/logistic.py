"""Numbers times the logistic function of a multiple of theirs, compiled: SiLU and all that is like it.

Nothing here is a sum, and the compiler may not round otherwise than what is written: so a number has the same bits
wherever it stands, be it in a vector or in what is left over of one. All of it is in one file, since numba looks at
the file alone to see whether its machine code is up to date.
"""

from __future__ import annotations

from typing import Any, cast

import numba
import numpy as np
import torch
from numba.extending import intrinsic

from lade.decoding.kernels import Kernel
from lade.model.worker_threads import in_parts

_AT_ONCE = 512  # numbers on their way through the first-level cache
_MANY = 2**16  # numbers that are worth a thread of their own

_ONE, _LARGE, _SHIFT = np.float32(1), np.float32(1e30), np.float32(1.5 * 2**23)
_LOG2_E, _LN2, _LN2_REST = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-87), np.float32(88.37)  # beyond which exponentials are 0 and infinite
_A, _B, _C = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_D, _E, _F = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_LOWEST, _HIGHEST, _ZERO, _ENDLESS = np.float32(-127), np.float32(128), np.float32(0), np.float32(np.inf)


def times_logistic(x: torch.Tensor, steep: float = 1.0, cubic: float = 0.0) -> torch.Tensor:
    """The argument times the logistic function of `steep * x + cubic * x ** 3`, computed in float32.

    Args:
        x: of 16 or 32 bits, on the CPU.
        steep: see above.
        cubic: see above.
    """
    if x.dtype not in (torch.bfloat16, torch.float32):
        return times_logistic(x.float(), steep, cubic).to(x.dtype)
    x = x.contiguous()
    found = torch.empty_like(x)
    places, numbers = (x.data_ptr(), found.data_ptr(), x.dtype == torch.bfloat16), x.numel()

    def run(
        part: int, parts: int, _alive: object = (x, found)
    ) -> None:  # in other threads, even if Ctrl-C ends this one
        weigh(*places, steep, cubic, numbers * part // parts, numbers * (part + 1) // parts)

    in_parts(run, numbers // _MANY)
    return found


def _array_at(kind: Any) -> Any:
    """A compiled function: the numbers of a kind from an address on, as an array of so many."""

    def pointer(context: Any, address: Any) -> Any:
        def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], context.get_value_type(_types.CPointer(kind)))

        return _types.CPointer(kind)(_types.int64), lower

    to_pointer, carray = cast(Any, intrinsic(pointer)), cast(Any, numba).carray
    return numba.njit(lambda address, count: carray(to_pointer(address), (count,)))


_types = cast(Any, numba.types)
_halves_at, _floats_at = _array_at(numba.uint16), _array_at(numba.float32)


@numba.njit
def _take(x: Any, are_halves: Any, bits: Any, numbers: Any, count: Any) -> None:
    """Read so many numbers from an address on; `numbers` are those of `bits`."""
    if are_halves:
        halves = _halves_at(x, count)
        for at in range(count):
            bits[at] = np.uint32(halves[at]) << np.uint32(16)
    else:
        floats = _floats_at(x, count)
        for at in range(count):
            numbers[at] = floats[at]


@numba.njit
def _give(found: Any, are_halves: Any, bits: Any, numbers: Any, count: Any) -> None:
    """Write so many numbers from an address on, rounded to the nearest, of two as near to the even one."""
    if are_halves:
        halves = _halves_at(found, count)
        for at in range(count):
            odd = (bits[at] >> np.uint32(16)) & np.uint32(1)
            rounded = (bits[at] + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            halves[at] = np.uint16(rounded) if numbers[at] == numbers[at] else np.uint16(0x7FC0)
    else:
        floats = _floats_at(found, count)
        for at in range(count):
            floats[at] = numbers[at]


def _weigh(x: Any, found: Any, are_halves: Any, steep: Any, cubic: Any, first: Any, last: Any) -> None:
    """Fill in `found` from `x`, from the first number to the one before the last.

    Args:
        x: address of bfloat16 or float32 numbers.
        found: likewise, of what becomes of them.
        are_halves: whether both are bfloat16, the upper halves of float32 numbers.
        steep: see `times_logistic`.
        cubic: likewise.
        first: of the numbers.
        last: of them, and one.
    """
    item, bits, power_bits = 2 if are_halves else 4, np.empty(_AT_ONCE, np.uint32), np.empty(_AT_ONCE, np.int32)
    numbers, powers = bits.view(np.float32), power_bits.view(np.float32)
    exponents, rest = np.empty(_AT_ONCE, np.float32), np.empty(_AT_ONCE, np.float32)
    for begin in range(first, last, _AT_ONCE):
        count = min(_AT_ONCE, last - begin)
        _take(x + item * begin, are_halves, bits, numbers, count)
        for at in range(count):
            number = numbers[at]
            square = number * number
            exponent = -number * (steep + cubic * (square if square < _LARGE else _LARGE))
            n = (exponent * _LOG2_E + _SHIFT) - _SHIFT
            n = n if n > _LOWEST else _LOWEST
            n = n if n < _HIGHEST else _HIGHEST
            r = (exponent - n * _LN2) - n * _LN2_REST
            rest[at] = ((((((_A * r + _B) * r + _C) * r + _D) * r + _E) * r + _F) * r + _ONE) * r + _ONE
            exponents[at] = exponent
            power_bits[at] = (np.int32(n) + np.int32(127)) << np.int32(23)
        for at in range(count):
            power = rest[at] * powers[at]
            power = _ZERO if exponents[at] < _LEAST else power
            power = _ENDLESS if exponents[at] > _MOST else power
            numbers[at] = numbers[at] / (_ONE + power)
        _give(found + item * begin, are_halves, bits, numbers, count)


weigh = Kernel(
    _weigh,
    (numba.int64, numba.int64, numba.boolean, numba.float32, numba.float32, numba.int64, numba.int64),
    nogil=True,
    error_model="numpy",
)
"""The kernel: `_weigh`, which gives up the interpreter's lock."""
