"""Calls of compiled kernels: arrays are checked and passed by address.

A C function takes an array as `const Array<T>*`, see kernels.h. Arrays that are used in many calls are bound once, as a
`Struct` of addresses; a call then passes one pointer, without a conversion.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from lade.native import require_library

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class _Header(ctypes.Structure):
    """The `Array` of kernels.h; an array of one dimension has no columns."""

    _fields_ = (("data", ctypes.c_void_p), ("rows", ctypes.c_int64), ("columns", ctypes.c_int64))


class ArrayType:
    """Type of an array argument: a C-contiguous array of one dtype, with one or two dimensions.

    Args:
        dtype: dtype of the array's elements.
        dimensions: number of dimensions, 1 or 2.
    """

    def __init__(self, dtype: npt.DTypeLike, dimensions: int) -> None:
        self.dtype, self.dimensions = np.dtype(dtype), dimensions

    def from_param(self, given: npt.NDArray[Any]) -> Any:
        """Return the array as ctypes passes it.

        Raises:
            TypeError: not an array, or one of another dtype, number of dimensions or layout; ctypes makes an
                `ArgumentError` of it.
        """
        if (
            not isinstance(given, np.ndarray)
            or given.dtype != self.dtype
            or given.ndim != self.dimensions
            or not given.flags.c_contiguous
        ):
            raise TypeError(f"{given!r} is not a contiguous array of {self.dtype} with {self.dimensions} dimensions")
        return ctypes.byref(_Header(given.ctypes.data, *given.shape))


class ListType:
    """Type of an argument that is a list of numbers: an array of one dimension, made at less than half of numpy's cost.

    Args:
        code: type of the elements, see `array.array`.
    """

    def __init__(self, code: str) -> None:
        self._code = code

    def from_param(self, numbers: Sequence[float]) -> Any:
        """Return the list as ctypes passes it."""
        elements = array(self._code, numbers)
        header = _Header(*elements.buffer_info(), 0)
        header.elements = elements  # which live as long as the call
        return ctypes.byref(header)


LONG_LIST, DOUBLE_LIST = ListType("q"), ListType("d")
INTS, TABLE = ArrayType(np.int32, 1), ArrayType(np.int32, 2)
LONGS, SCORES, HALVES = ArrayType(np.int64, 1), ArrayType(np.float32, 2), ArrayType(np.uint16, 2)
FLOATS, DOUBLES, MATRIX = ArrayType(np.float32, 1), ArrayType(np.float64, 1), ArrayType(np.float64, 2)
INT, DOUBLE, STRUCT = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
"""Types of the kernels' arguments."""


class Struct:
    """A C struct of 64-bit fields, addresses among them; it lives as long as this object.

    Args:
        fields: values of all fields in their order.
        arrays: the arrays whose addresses are among them.
    """

    __slots__ = ("_arrays", "_as_parameter_", "fields")

    def __init__(self, fields: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> None:
        self.fields, self._arrays = (ctypes.c_int64 * len(fields))(*fields), arrays
        self._as_parameter_ = ctypes.addressof(self.fields)

    @property
    def address(self) -> int:
        """The address of the struct."""
        return self._as_parameter_


class NativeKernel:
    """A C function of the library.

    Args:
        declared: its declaration; the C function is `lade_` and this name without leading underscores.
        types: types of all arguments in their order.
        result: type of the result; None if it returns nothing.
        keeps_lock: hold the interpreter's lock during a call, so that no thread sees shared arrays half written. For
            calls of some microseconds: another thread that took the lock might keep it for milliseconds.
    """

    def __init__(self, declared: Callable[..., Any], types: Sequence[Any], result: Any, *, keeps_lock: bool) -> None:
        self.__name__, self.__doc__ = declared.__name__, declared.__doc__
        self.types, self._result, self._keeps_lock = types, result, keeps_lock
        self._run: Callable[..., Any] = self._first_call

    def __call__(self, *args: Any) -> Any:
        """Call the C function.

        Raises:
            UnsupportedError: there is no library.
        """
        return self._run(*args)

    def _first_call(self, *args: Any) -> Any:
        function = require_library(keeps_lock=self._keeps_lock)["lade_" + self.__name__.lstrip("_")]
        function.argtypes, function.restype = self.types, self._result
        self._run = function  # last: other threads call it from now on
        return function(*args)


def kernel(*types: Any, result: Any = None, keeps_lock: bool = True) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that makes a declaration, a function without a body, call the C function of its name."""

    def decorate(declared: FunctionT) -> FunctionT:
        return cast(FunctionT, NativeKernel(declared, types, result, keeps_lock=keeps_lock))

    return decorate
