"""Atomic file writes, and append-only JSON Lines files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

from lade.errors import InputError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise `OSError` where a file cannot be written, which the permissions of its folder do not always tell."""
    target = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.", suffix=".tmp")
    os.close(handle)
    Path(name).unlink()


def write_whole(path: str | os.PathLike[str], content: bytes | str, *, durable: bool = False) -> None:
    """Replace a file: a reader, now or after a failure, finds the old content or the new one, never a part.

    The permissions of a file that is replaced stay; a new one can be read by its owner alone until then. A symbolic
    link is followed.

    Args:
        path: the file; its folder must exist.
        content: bytes, or text for UTF-8.
        durable: whether to wait until the disk has it, so that it survives a power cut, too.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(os.path.realpath(path))
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.", suffix=".tmp")
    try:
        with open(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, name)
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


_LONGEST, _CONTEXT = 60, 20  # characters of a value in a message; of them, what two texts have in common


def whole_lines(raw: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that end, and how many bytes they have; what comes after them was torn when its process was killed.

    Args:
        raw: all that is in the file.
        path: of the file, for the message.

    Raises:
        InputError: a line that ends is no JSON object.
    """
    whole = raw.rfind(b"\n") + 1
    lines = []
    for number, line in enumerate(raw[:whole].split(b"\n")[:-1], start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise InputError(f"{str(path)!r} is damaged at line {number} ({problem}): give another --out") from problem
        if not isinstance(found, dict):
            raise InputError(f"{str(path)!r} is damaged at line {number} (no object): give another --out")
        lines.append(found)
    return lines, whole


def differences(there: Any, here: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Names of the values that differ, such as `settings.max_new_tokens`, with both; None for one that is missing."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            yield from differences(there.get(key), here.get(key), f"{name}.{key}".removeprefix("."))
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, pair in enumerate(zip(there, here, strict=True), start=1):
            yield from differences(*pair, f"{name} {number}")
    elif there != here:
        yield name, there, here


def require_same(there: Any, here: Any, place: str) -> None:
    """Raise `InputError` that names the first difference between what is in a file and what is asked for now.

    Args:
        there: out of the file.
        here: what is asked for; anything JSON can hold, with lists for tuples.
        place: the file, or the line in it, for the message.
    """
    for name, old, new in differences(there, here):
        skip = _alike(old, new)
        raise InputError(
            f"{name} is {_shown(new, skip)} here, but {_shown(old, skip)} in {place}: go on with what the run began "
            "with, or give another --out"
        )


def _alike(old: Any, new: Any) -> int:
    """How much of the beginning of two texts need not be shown."""
    if not (isinstance(old, str) and isinstance(new, str)):
        return 0
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
    return max(0, alike - _CONTEXT)


def _shown(value: Any, skip: int) -> str:
    """As JSON, and not too long."""
    text = json.dumps(f"...{value[skip:]}" if skip else value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
