"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


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
