"""Compiled kernels: one shared library with a C interface, built from the C++17 files of this folder.

    sources.py     name of the library, a digest of its sources, and the header `layout.h` that the build generates
    kernel.py      calls from Python: checked arrays, structs of arrays
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
"""

from __future__ import annotations

import ctypes
import logging
import platform
from functools import cache
from pathlib import Path

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
        keeps_lock: the library whose calls hold the interpreter's lock; see `lade.native.kernel.NativeKernel`.
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
