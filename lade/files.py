"""Atomic file writes, and records saved under keys."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any, TypeVar

import platformdirs

logger = logging.getLogger(__name__)
T = TypeVar("T")
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # that are opened: Pillow has EPS, too, which is executed
MAX_AGE_S = 30 * 24 * 3600.0
"""Age at which a record of `Records` is made anew."""


def write_whole(path: str | os.PathLike[str], content: bytes | str, *, durable: bool = False) -> None:
    """Replace a file atomically: readers find the old content or the new, never a part, even after a crash.

    A replaced file keeps its permissions; a new one is readable by its owner alone. Symbolic links are followed. With
    `durable` the data is on disk on return, to survive a power failure.
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


def digest_of(key: Mapping[str, object]) -> str:
    """Return a short name of a key, anything that JSON can hold; the same in every process."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Records:
    """What was measured or tried here, in the user's cache folder: one small JSON file per key.

    It is only a cache: a file that is damaged, foreign or older than 30 days is as good as none, since a key covers
    neither drivers nor power settings, and a folder that cannot be written to costs the work again at the next start.
    So none of this is an error; the logger `lade` tells.
    """

    kind: str  # name of the folder in the user's cache folder
    what: str  # a record holds, for the logger
    folder: Path | None = None  # another folder for the files

    def path_of(self, key: Mapping[str, object]) -> Path:
        """Return the path of a key's file."""
        users = Path(platformdirs.user_cache_dir("lookahead-decoding", appauthor=False))
        return (self.folder or users / self.kind) / f"{digest_of(key)}.json"

    def load(self, key: Mapping[str, object], read: Callable[[dict[str, Any]], T]) -> T | None:
        """Return what `read` makes of the fields saved under a key; None if there is nothing that can be used.

        For damaged fields `read` raises `ValueError`, `KeyError` or `TypeError`.
        """
        path = self.path_of(key)
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if digest_of({"key": record["key"]}) != digest_of({"key": key}):
                raise ValueError("it was saved under another key")
            found = read(record)
            return found if abs(time() - record.get("saved_at", 0.0)) <= MAX_AGE_S else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as problem:
            logger.warning("%s in %s cannot be used and will be measured again: %r", self.what, path, problem)
            return None

    def save(self, key: Mapping[str, object], fields: Mapping[str, object]) -> bool:
        """Save fields under a key, beside the time or with their own `saved_at`; return whether that was possible."""
        path = self.path_of(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps({"key": dict(key), "saved_at": time(), **fields}, indent=1))
        except OSError as problem:
            logger.warning("%s cannot be saved in %s, and is measured again: %s", self.what, path.parent, problem)
            return False
        return True
