"""Vectors as types of compiled functions, and their conversions, for those that build instructions."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.extending import models, register_model

from lade.backends.cpu.kernels.instructions import INT


class Vector(numba.types.Type):
    """So many float32 numbers."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"float32x{lanes}")


class Sizes(numba.types.Type):
    """The bits of so many absolute values, which have their order; what is not a number is larger than all."""

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        super().__init__(name=f"sizes{lanes}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, ir.VectorType(ir.FloatType(), vector.lanes))  # type: ignore[no-untyped-call]


@register_model(Sizes)
class _SizesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, sizes: Sizes) -> None:
        super().__init__(manager, sizes, ir.VectorType(INT, sizes.lanes))  # type: ignore[no-untyped-call]


def equal(value: float, kind: Any) -> Any:
    """A vector of equal constants."""
    return ir.Constant(kind, [value] * kind.count)


def spread_out(builder: Any, number: Any, lanes: int) -> Any:
    """A vector of a number as often as there are lanes."""
    kind = ir.VectorType(number.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), number, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, first, equal(0, ir.VectorType(INT, lanes)))


def widened(builder: Any, halves: Any) -> Any:
    """Float32 numbers of which bfloat16 ones, given as integers, are the upper halves."""
    kind, floats = (ir.VectorType(each, halves.type.count) for each in (INT, ir.FloatType()))
    return builder.bitcast(builder.shl(builder.zext(halves, kind), equal(16, kind)), floats)


def rounded(builder: Any, numbers: Any) -> Any:
    """Numbers in bfloat16, as integers: the nearest, of two as near the even one."""
    kind, halves = (ir.VectorType(ir.IntType(size), numbers.type.count) for size in (32, 16))
    bits = builder.bitcast(numbers, kind)
    odd = builder.and_(builder.lshr(bits, equal(16, kind)), equal(1, kind))
    found = builder.lshr(builder.add(bits, builder.add(odd, equal(0x7FFF, kind))), equal(16, kind))
    found = builder.select(builder.fcmp_ordered("==", numbers, numbers), found, equal(0x7FC0, kind))
    return builder.trunc(found, halves)
