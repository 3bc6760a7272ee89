"""Compile kernels on first use or ahead of time, and cache their machine code across processes.

The kernels themselves live in packages named `kernels`, each with every function and constant it depends on: see
`KernelCache`.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import inspect
import logging
from collections.abc import Callable
from functools import cache
from time import perf_counter
from typing import Any, TypeVar, cast

import numba
from numba.core import typing
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from lade.announcements import announce


class KernelCache(FunctionCache):
    """Cache of a function's machine code, invalidated by a change to any source file that it was compiled from.

    numba checks the function's own file alone, but machine code also contains the functions it calls and the values of
    constants. So kernels live in packages named `kernels`: code compiled there calls nothing that is compiled
    elsewhere, and its machine code is valid while all files of that package are unchanged.

    Args:
        function: the function to compile.
        sources: digest that `sources_of` returned when the function was defined.

    Raises:
        RuntimeError: there is no writable folder for machine code.
    """

    def __init__(self, function: Callable[..., Any], sources: bytes) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        stamp = self._impl.locator.get_source_stamp(), sources
        self._cache_file = IndexDataCacheFile(self.cache_path, self._impl.filename_base, stamp)  # type: ignore[no-untyped-call]


def sources_of(function: Callable[..., Any]) -> bytes:
    """Return a digest of all files in the kernel package that a function belongs to; empty if it belongs to none.

    The digest is taken once per package, at the first call: if a file changes before one of its functions is compiled,
    both the machine code and the digest still describe the source that was imported.
    """
    package = (function.__module__ or "").rpartition(".")[0]
    return _digest(package) if package.rpartition(".")[2] == "kernels" else b""


@cache
def _digest(package: str) -> bytes:
    folder, digest = importlib.resources.files(package), hashlib.sha256()
    if folder.is_dir():  # else the package is frozen into an executable, whose stamp numba checks
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            if file.name.endswith(".py"):
                digest.update(hashlib.sha256(file.name.encode()).digest() + hashlib.sha256(file.read_bytes()).digest())
    return digest.digest()


logger = logging.getLogger(__name__)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Kernel:
    """A function that is compiled, or loaded from numba's cache, on its first call.

    Args:
        function: a function of numpy arrays and numbers, in the subset of Python that numba compiles.
        types: numba types of its arguments.
        options: keyword arguments of `numba.njit`.
    """

    def __init__(self, function: Callable[..., Any], types: tuple[object, ...], **options: Any) -> None:
        self.__wrapped__, self._types, self._options = function, types, options
        self._sources = sources_of(function)
        self._machine_code: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Call the compiled function."""
        return (self._machine_code or self.compile())(*args)

    def compile(self) -> Callable[..., Any]:
        """Compile the function unless that was done before; return the machine code."""
        if self._machine_code is None:
            start = perf_counter()
            self._machine_code = self._compiled()
            _log_compilation(self._machine_code, perf_counter() - start)
        return self._machine_code

    def _compiled(self) -> Callable[..., Any]:
        dispatcher: Any = numba.njit(self.__wrapped__, **self._options)
        if dispatcher is not self.__wrapped__:  # numba is not switched off
            self._attach_cache(dispatcher)
            dispatcher.compile(self._types)
            dispatcher.disable_compile()
        return cast(Callable[..., Any], dispatcher)

    def _attach_cache(self, code: Any) -> None:
        """Attach the on-disk cache to a dispatcher, unless there is no folder for it."""
        try:
            code._cache = KernelCache(self.__wrapped__, self._sources)
        except RuntimeError as problem:
            if "cannot cache" not in str(problem):
                raise


def compiled(*types: object) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that compiles a function on its first call, for arguments of these numba types."""

    def decorate(function: FunctionT) -> FunctionT:
        return cast(FunctionT, Kernel(function, types))

    return decorate


class TeamKernel(Kernel):
    """A kernel that several threads enter at once, each with the same argument address, without holding the GIL.

    Args:
        function: takes an address in memory as an integer. It runs outside the interpreter and must not raise.
    """

    def __init__(self, function: Callable[[int], None]) -> None:
        super().__init__(function, (numba.int64,), error_model="numpy")
        self._enter: Callable[[int], None] | None = None

    def __call__(self, *args: Any) -> None:
        """Run the kernel in this thread on the arguments at the given address."""
        if self._enter is None:
            self._enter = cast(Callable[[int], None], self.compile().ctypes)
        self._enter(*args)

    @property
    def address(self) -> int:
        """Address of the machine code, a C function."""
        return cast(int, self.compile().address)

    def compile(self) -> Any:
        """Compile the function unless that was done before; return the compiled C function."""
        return super().compile()

    def _compiled(self) -> Any:
        function: Any = cast(Any, CFunc)(self.__wrapped__, (self._types, numba.void), {}, self._options)
        self._attach_cache(function)
        function.compile()
        return function


CONSTANT = object()
"""Marks an instruction's argument as a compile-time constant, in place of a type."""


def instruction(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes an LLVM-emitting function `(builder, *values)` callable from compiled code.

    Args:
        result: numba type of the result.
        arguments: numba types of the arguments; `CONSTANT` for one that must be a literal.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(context: Any, *given: Any) -> Any:
            constants = [getattr(each, "literal_value", None) for each in given]
            if any(kind is CONSTANT and constant is None for kind, constant in zip(arguments, constants, strict=True)):
                return None  # numba reports the arguments that do not match
            wanted = [each if kind is CONSTANT else kind for each, kind in zip(given, arguments, strict=True)]

            def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                known = zip(arguments, constants, values, strict=True)
                found = emit(builder, *(constant if kind is CONSTANT else value for kind, constant, value in known))
                return context.get_dummy_value() if found is None else found

            return cast(Any, typing).signature(result, *wanted), lower

        vars(typed)["__signature__"] = inspect.signature(emit)
        return intrinsic(prefer_literal=CONSTANT in arguments)(typed)

    return decorate


def inlined(function: FunctionT) -> FunctionT:
    """Compile a function for use inside other kernels."""
    return cast(FunctionT, numba.njit(function, error_model="numpy"))


def _log_compilation(compiled: Any, seconds: float) -> None:
    """Log a compilation, unless the machine code came from the cache."""
    stats = getattr(compiled, "stats", compiled)
    if not getattr(stats, "cache_hits", True):  # with numba disabled there are no statistics
        _log_first_compilation()
        logger.debug("compiled %s in %.1f s", compiled.__name__, seconds)


@cache
def _log_first_compilation() -> None:
    announce(logger, "compiling the kernels, once on this machine: some 5 to 20 seconds")
