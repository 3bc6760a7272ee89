"""Name of the compiled library, and a digest of the sources it is built from; used by the build and by the loader."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path


def library_name() -> str:
    """Return the file name of the compiled library on this platform.

    A name that ends in ".so" would look like an extension module to `pkgutil.walk_packages`, which tools import.
    """
    return "kernels.dll" if sys.platform == "win32" else "kernels.so.1"


def digest_of(folder: Path) -> str:
    """Return a digest of all C++ sources and headers in a folder; empty if there are none, as in a wheel."""
    files = sorted(path for path in folder.iterdir() if path.suffix in {".cpp", ".h"})
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16] if files else ""
