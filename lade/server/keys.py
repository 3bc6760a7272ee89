"""API keys, read from a file or the environment, so that no list of processes shows them."""

from __future__ import annotations

import hmac
import logging
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lade.errors import InputError

logger = logging.getLogger(__name__)

ENVIRONMENT = "LADE_API_KEYS"
_NAMED = re.compile(r"([\w.-]{1,64}):(\S+)")


@dataclass(frozen=True)
class Key:
    """A key.

    Attributes:
        name: what logs call it; its number where the file has none.
        secret: what a client sends.
    """

    name: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class Keys:
    """Who may ask.

    Attributes:
        all: the keys; without any, everyone may.
    """

    all: tuple[Key, ...] = ()

    @classmethod
    def read(cls, path: Path | None, environment: str | None = None) -> Keys:
        """Those of a file and those of the environment; of a file that all users of the machine can read, a warning.

        Args:
            path: has one key a line, with a name or without: `alice:sk-...`. Empty lines and those that begin with #
                are none.
            environment: some more, with spaces between them.

        Raises:
            InputError: the file cannot be read, or one of them has no key, or something that is none.
        """
        found: list[Key] = []
        if path is not None:
            _gather(found, _lines(path), f"key file {str(path)!r}", "line", "write one a line")
        if environment is not None:
            _gather(found, environment.split(), ENVIRONMENT, "key", "give some with spaces between them, or unset it")
        return cls(tuple(found))

    def find(self, secret: str) -> str | None:
        """The name of the key with this secret. All are compared, in a time that does not tell how far they agree."""
        found = None
        for key in self.all:
            if hmac.compare_digest(key.secret.encode(), secret.encode(errors="replace")):
                found = key.name
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
    """Add the keys of a source to those that were found."""
    before = len(found)
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        named = _NAMED.fullmatch(line)
        secret = named[2] if named else line
        if re.search(r"\s", secret) or not secret.isascii():
            raise InputError(f"{source}, {unit} {number}: a key has no spaces and only ASCII in it")
        found.append(Key(named[1] if named else f"key-{len(found) + 1}", secret))
    if len(found) == before:
        raise InputError(f"{source} has no keys: {remedy}")
