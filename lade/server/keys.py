"""API keys: their names, limits and files."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from lade.errors import InputError

logger = logging.getLogger(__name__)

ENVIRONMENT = "LADE_API_KEYS"
_NAMED = re.compile(r"([\w.-]{1,64}):(\S+)")


@dataclass(frozen=True)
class KeyLimits:
    """Limits of a key; None for no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers
    rows: int | None = None  # choices in the queue or decoded at a time


NO_LIMITS = KeyLimits()
_LIMIT = re.compile(rf"({'|'.join(each.name for each in fields(KeyLimits))})=([1-9]\d{{0,11}})", re.ASCII)


@dataclass(frozen=True)
class Key:
    """An API key: its name in logs, and the secret that clients send."""

    name: str
    secret: str = field(repr=False)
    named: bool = True  # in the file or the environment; otherwise the name has the key's number
    limits: KeyLimits = NO_LIMITS

    @property
    def owner(self) -> str:
        """Return the tenant of this key: its name, or a digest of the secret if it has none.

        A number would not do: after the keys are read again it may belong to another key.
        """
        return f"name:{self.name}" if self.named else f"sha256:{hashlib.sha256(self.secret.encode()).hexdigest()}"


@dataclass(frozen=True)
class Keys:
    """All API keys; if there are none, requests need no key."""

    all: tuple[Key, ...] = ()

    @classmethod
    def read(cls, path: Path | None, environment: str | None = None) -> Keys:
        """Read keys from a file and the environment; warn if all users of the machine can read the file.

        Args:
            path: file with one key per line, optionally named and followed by limits, as in
                `alice:sk-... requests_per_minute=60 rows=4`; # begins a comment line.
            environment: further keys, separated by spaces.

        Raises:
            InputError: the file cannot be read, a source has no key, or a key is malformed.
        """
        found: list[Key] = []
        if path is not None:
            _gather(found, _lines(path), f"key file {str(path)!r}", "line", "write one per line")
        if environment is not None:
            _gather(found, environment.split(), ENVIRONMENT, "key", "separate keys by spaces, or unset it")
        return cls(tuple(found))

    def find(self, secret: str) -> Key | None:
        """Return the key with this secret, comparing all keys in constant time."""
        found = None
        for key in self.all:
            if hmac.compare_digest(key.secret.encode(), secret.encode(errors="replace")):
                found = key
        return found


NO_KEYS = Keys()


def _lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        open_to_all = path.stat().st_mode & stat.S_IROTH
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8"
        raise InputError(f"key file {str(path)!r} cannot be read: {reason}; check path and permissions") from None
    if open_to_all:
        logger.warning("key file %r can be read by all users of this machine: run  chmod o-r FILE", str(path))
    return lines


def _gather(found: list[Key], lines: Sequence[str], source: str, unit: str, remedy: str) -> None:
    """Add the keys of one source."""
    before = len(found)
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        word, *limits = line.split()
        named, given = _NAMED.fullmatch(word), [_LIMIT.fullmatch(limit) for limit in limits]
        name, secret = named.groups() if named else (f"key-{len(found) + 1}", word)
        if not secret.isascii() or None in given:
            known = ", ".join(f"{each.name}=N" for each in fields(KeyLimits))
            why = f"keys are ASCII without spaces; after a key there may be {known}"
            raise InputError(f"{source}, {unit} {number}: {why}")
        allowed = KeyLimits(**{limit[1]: int(limit[2]) for limit in given if limit is not None})
        found.append(Key(name, secret, named=named is not None, limits=allowed))
    if len(found) == before:
        raise InputError(f"{source} has no keys: {remedy}")
