"""Compiled kernels: one shared library with a C interface, built from the C++17 files of this folder.

    sources.py     name of the library, a digest of its sources, and the header `layout.h` that the build generates
    kernels.h      `LADE_KERNEL`, the export of a function; arrays as Python passes them
    library.cpp    identity of the library
    drafting.h     structs of the drafting kernels, see `lade.decoding.kernels`
    tree.cpp, growth.cpp, mixing.cpp, requests.cpp, tables.cpp, reading.cpp
    cpu.h          kernels of packed layers and invariant models, all other files; cpu.cpp selects them

`setup.py` builds the library with the package if there is a C++17 compiler. In a checkout `make native`, or
`python setup.py build_ext --inplace`, builds it in place; a library of other sources than those beside it is not used.

To add a kernel, write a `.cpp` file here: the build takes all of them. Functions are
`LADE_KERNEL void lade_name(...)` with addresses, `int64_t` and `double` as arguments. They must not throw. Python calls
them as `library().lade_name(...)` with `argtypes` set once; ctypes releases the GIL during the call. Code for a
processor's instructions is selected at run time: `__attribute__((target("avx512f")))` on its functions or a pragma
around them, never a flag of the whole build. Floating-point products are not contracted (`-ffp-contract=off`): write
`std::fma` where it is meant.

Calls check arrays and pass them by address. A C function takes an array as `const Array<T>*`, see kernels.h. Arrays
that are used in many calls are bound once, as a `Struct` of addresses; a call then passes one pointer, without a
conversion.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from lade.announcements import announce_once
from lade.errors import UnsupportedError
from lade.native.sources import digest_of, library_name

logger = logging.getLogger(__name__)
COMPILER_REMEDY = "install a C++17 compiler (g++ or clang), and install this package again (in a checkout: make native)"
"""What to do without the library; after a colon."""
WITHOUT = "drafts are those of the paper's n-gram pool alone, without budgets, memories and MTP layers"
"""What drafting does without the library."""
_CPU_INFO = Path("/proc/cpuinfo")


def library_path() -> Path:
    """Return the path of the compiled library; there may be none."""
    return Path(__file__).parent / library_name()


@cache
def processor_name(info: Path = _CPU_INFO) -> str:
    """Return the processor's name, such as "AMD EPYC 9654 96-Core Processor", for the keys of what was measured here.

    Args:
        info: the kernel's description of the processor, on Linux.
    """
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def library(*, keeps_lock: bool = False) -> ctypes.CDLL | None:
    """Return the compiled library; None, with one line that says why, if there is none to use.

    Args:
        keeps_lock: the library whose calls hold the interpreter's lock; see `lade.native.NativeKernel`.
    """
    path = library_path()
    if not path.exists():
        announce_once(logger, f"the compiled kernels are missing: {WITHOUT}; {COMPILER_REMEDY}", logging.WARNING)
        return None
    loaded: ctypes.CDLL = (ctypes.PyDLL if keeps_lock else ctypes.CDLL)(str(path))
    loaded.lade_sources.restype = ctypes.c_char_p
    sources = digest_of(path.parent)
    if sources and loaded.lade_sources() != sources.encode():
        announce_once(
            logger, f"the compiled kernels are older than their sources: {WITHOUT}; run  make native", logging.WARNING
        )
        return None
    return loaded


@cache
def require_library(*, keeps_lock: bool = False) -> ctypes.CDLL:
    """Return the compiled library, see `library`.

    Raises:
        UnsupportedError: there is none to use.
    """
    loaded = library(keeps_lock=keeps_lock)
    if loaded is None:
        raise UnsupportedError("the compiled kernels are missing", COMPILER_REMEDY)
    return loaded


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
