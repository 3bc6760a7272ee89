"""API keys, read from a file so that no process list shows them."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, field
from pathlib import Path

from lade.errors import InputError

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
    def read(cls, path: Path) -> Keys:
        """One key a line, with a name or without: `alice:sk-...`. Empty lines and those that begin with # are none.

        Raises:
            InputError: it cannot be read, or has no key, or a line that is none.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = getattr(problem, "strerror", None) or "it is not UTF-8"
            raise InputError(f"key file {str(path)!r} cannot be read: {reason}; check path and permissions") from None
        lines = [line.strip() for line in text.splitlines()]
        found: list[Key] = []
        for number, line in enumerate(lines, start=1):
            if not line or line.startswith("#"):
                continue
            named = _NAMED.fullmatch(line)
            secret = named[2] if named else line
            if re.search(r"\s", secret) or not secret.isascii():
                raise InputError(f"key file {str(path)!r}, line {number}: a key has no spaces and only ASCII in it")
            found.append(Key(named[1] if named else f"key-{len(found) + 1}", secret))
        if not found:
            raise InputError(f"key file {str(path)!r} has no keys: write one a line")
        return cls(tuple(found))

    def find(self, secret: str) -> str | None:
        """The name of the key with this secret. All are compared, in a time that does not tell how far they agree."""
        found = None
        for key in self.all:
            if hmac.compare_digest(key.secret.encode(), secret.encode(errors="replace")):
                found = key.name
        return found


NO_KEYS = Keys()
