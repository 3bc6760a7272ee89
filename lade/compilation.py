"""Compile kernels lazily or ahead of time, and cache their machine code across processes.

What is compiled is elsewhere, each time in one package of kernels with all that it calls and every constant that it
depends on, see `KernelCache`.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import inspect
import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from time import perf_counter
from types import ModuleType
from typing import Any, TypeVar, cast

import numba
from numba.core import typing
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.extending import intrinsic


class KernelCache(FunctionCache):
    """Where the machine code of a function is kept, as long as no file changes that it is made of.

    numba looks at the function's own file alone, but machine code contains all that the function calls, and the values
    of constants. A *package of kernels* is one by the name of `kernels`: what is compiled there calls nothing that is
    compiled elsewhere, and its machine code is up to date only while all the package's files are what they were.

    Args:
        function: to compile.
        sources: what `sources_of` returned when the function was defined.

    Raises:
        RuntimeError: there is no folder to keep machine code in.
    """

    def __init__(self, function: Callable[..., Any], sources: bytes) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        stamp = self._impl.locator.get_source_stamp(), sources
        self._cache_file = IndexDataCacheFile(self.cache_path, self._impl.filename_base, stamp)  # type: ignore[no-untyped-call]


def sources_of(function: Callable[..., Any]) -> bytes:
    """A digest of all files of the package of kernels that a function is in; nothing if it is in none.

    It is that of the files as they were when this was first asked about the package: should a file change before a
    function of it is compiled, what is compiled, and kept, is still what was read from it.
    """
    package = (function.__module__ or "").rpartition(".")[0]
    return _digest(package) if package.rpartition(".")[2] == "kernels" else b""


@cache
def _digest(package: str) -> bytes:
    folder, digest = importlib.resources.files(package), hashlib.sha256()
    if folder.is_dir():  # else it is part of an executable file, which numba looks at
        for file in sorted(folder.iterdir(), key=lambda file: file.name):
            if file.name.endswith(".py"):
                digest.update(hashlib.sha256(file.name.encode()).digest() + hashlib.sha256(file.read_bytes()).digest())
    return digest.digest()


logger = logging.getLogger(__name__)

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class Kernel:
    """A function that is compiled, or whose machine code is read from numba's cache, when it is first called.

    Args:
        function: of numpy arrays and numbers.
        types: of its arguments, as numba calls them.
        options: of `numba.njit`.
    """

    def __init__(self, function: Callable[..., Any], types: tuple[object, ...], **options: Any) -> None:
        self.__wrapped__, self._types, self._options = function, types, options
        self._sources = sources_of(function)
        self._machine_code: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        return (self._machine_code or self.compile())(*args)

    def compile(self) -> Callable[..., Any]:
        """Compile it, unless that is done."""
        if self._machine_code is None:
            start = perf_counter()
            self._machine_code = self._compiled()
            _log_compilation(self._machine_code, perf_counter() - start)
        return self._machine_code

    def _compiled(self) -> Callable[..., Any]:
        dispatcher: Any = numba.njit(self.__wrapped__, **self._options)
        if dispatcher is not self.__wrapped__:  # numba is not switched off
            self._keep(dispatcher)
            dispatcher.compile(self._types)
            dispatcher.disable_compile()
        return cast(Callable[..., Any], dispatcher)

    def _keep(self, code: Any) -> None:
        """Have numba keep machine code, or take what was kept, unless there is no folder for it."""
        try:
            code._cache = KernelCache(self.__wrapped__, self._sources)
        except RuntimeError as problem:
            if "cannot cache" not in str(problem):
                raise


def compiled(*types: object) -> Callable[[FunctionT], FunctionT]:
    """Compile at the first call, for arguments of these types."""

    def decorate(function: FunctionT) -> FunctionT:
        return cast(FunctionT, Kernel(function, types))

    return decorate


class TeamKernel(Kernel):
    """A function that several threads enter at once, each with the same address of what to do, and that holds no lock.

    Args:
        function: of an address in memory, an integer, called without the interpreter: it must not raise.
    """

    def __init__(self, function: Callable[[int], None]) -> None:
        super().__init__(function, (numba.int64,), error_model="numpy")
        self._enter: Callable[[int], None] | None = None

    def __call__(self, *args: Any) -> None:
        """Run it in this thread, given the address."""
        if self._enter is None:
            self._enter = cast(Callable[[int], None], self.compile().ctypes)
        self._enter(*args)

    @property
    def address(self) -> int:
        """Of the machine code, a function of C."""
        return cast(int, self.compile().address)

    def compile(self) -> Any:
        """Compile it, unless that is done."""
        return super().compile()

    def _compiled(self) -> Any:
        function: Any = cast(Any, CFunc)(self.__wrapped__, (self._types, numba.void), {}, self._options)
        self._keep(function)
        function.compile()
        return function


CONSTANT = object()
"""In place of an instruction's type: a number that is known when it is compiled, which it gets as such."""


def instruction(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """A function of a builder of LLVM and values, as one that compiled functions may call with such arguments."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def typed(context: Any, *given: Any) -> Any:
            constants = [getattr(each, "literal_value", None) for each in given]
            if any(kind is CONSTANT and constant is None for kind, constant in zip(arguments, constants, strict=True)):
                return None  # numba says which arguments do not fit
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
    """Compile as part of those that call it."""
    return cast(FunctionT, numba.njit(function, error_model="numpy"))


def compile_all(package: ModuleType) -> None:
    """Compile all kernels in a package's files now, as far as no machine code was kept from before.

    Those of `lade.decoding.kernels` take 5 to 12 seconds, once on a machine.
    """
    for file in iter_modules(package.__path__):
        for thing in list(vars(import_module(f"{package.__name__}.{file.name}")).values()):
            if isinstance(thing, Kernel):
                thing.compile()


def _log_compilation(compiled: Any, seconds: float) -> None:
    """Log that a function was compiled, unless its machine code was kept from before."""
    stats = getattr(compiled, "stats", compiled)
    if not getattr(stats, "cache_hits", True):  # none is counted where numba is switched off
        _log_first_compilation()
        logger.debug("compiled %s in %.1f s", compiled.__name__, seconds)


@cache
def _log_first_compilation() -> None:
    logger.info("compiling the inner loops, once on this machine: some seconds")
