"""Name of the compiled library, its generated header, and a digest of its sources; for the build and the loader."""

from __future__ import annotations

import ast
import hashlib
import sys
from pathlib import Path


def library_name() -> str:
    """Return the file name of the compiled library on this platform.

    A name that ends in ".so" would look like an extension module to `pkgutil.walk_packages`, which tools import.
    """
    return "kernels.dll" if sys.platform == "win32" else "kernels.so.1"


def layout_beside(folder: Path) -> Path:
    """Return the path of the module whose constants the sources in a folder share; see `header_of`."""
    return folder.parent / "decoding/kernels/layout.py"


def digest_of(folder: Path) -> str:
    """Return a digest of all C++ sources and headers in a folder, and of the constants that they share with Python.

    It is empty if there are none, as in a wheel.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in {".cpp", ".h"})
    layout, digest = layout_beside(folder), hashlib.sha256()
    for file in [*files, layout] if layout.exists() else files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16] if files else ""


def header_of(layout: Path) -> str:
    """Return a C++ header with the constants of a Python module: whole numbers, floats, and tuples of whole numbers."""
    named = [node for node in ast.parse(layout.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign)]
    lines, found = list[str](), dict[str, float | tuple[int, ...]]()
    for node in named:
        names = [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
        if not all(map(str.isupper, names)):
            continue  # an alias of a type
        exec(compile(ast.Module([node], []), str(layout), "exec"), found)
        for name in names:
            value = found[name]
            if isinstance(value, tuple):
                lines.append(f"constexpr int {name}[] = {{{', '.join(map(str, value))}}};")
            else:
                lines.append(f"constexpr {type(value).__name__.replace('float', 'double')} {name} = {value!r};")
    return "\n".join(["#pragma once", "namespace lade {", *lines, "}", ""])
