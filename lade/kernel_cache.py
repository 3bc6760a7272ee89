"""The machine code that is kept of compiled functions, and when it is up to date."""

from __future__ import annotations

import hashlib
import importlib.resources
from collections.abc import Callable
from functools import cache
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile


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
