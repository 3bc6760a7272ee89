"""Reads JSON objects, one a line or in an array, with places for error messages."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lade.errors import InputError


@dataclass(frozen=True)
class Entry:
    """One object of a file.

    Attributes:
        place: such as "'prompts.jsonl' line 3".
        number: its line, from 1; in an array its number there.
        values: the object.
    """

    place: str
    number: int
    values: dict[str, Any]

    def text(self, key: str) -> str:
        """The text under a key, which must be there and not be empty.

        Raises:
            InputError: it is not.
        """
        return self._checked(self._value(key, "a text"), f"{key!r}")

    def texts(self, key: str) -> list[str]:
        """The list of texts under a key, at least one.

        Raises:
            InputError: it is something else.
        """
        found = self._value(key, "a list of texts")
        if not isinstance(found, list) or not found:
            raise InputError(f"{self.place}: {key!r} is {_named(found)}: give a list of at least one text")
        return [self._checked(each, f"{key!r}[{index}]") for index, each in enumerate(found)]

    def name(self, key: str) -> str:
        """The text or whole number under a key, as a text.

        Raises:
            InputError: it is something else.
        """
        found = self._value(key, "a text or a number")
        if isinstance(found, int) and not isinstance(found, bool):
            return str(found)
        return self._checked(found, f"{key!r}", "a text or a whole number")

    def _value(self, key: str, wanted: str) -> Any:
        if key not in self.values:
            there = ", ".join(map(repr, self.values)) or "no keys"
            raise InputError(
                f"{self.place}: there is no {key!r}, only {there}: add it as {wanted}, or give another format"
            )
        return self.values[key]

    def _checked(self, found: object, name: str, wanted: str = "a text") -> str:
        if not isinstance(found, str):
            raise InputError(f"{self.place}: {name} is {_named(found)}: give {wanted}")
        if not found:
            raise InputError(f"{self.place}: {name} is empty: give at least one character")
        try:
            found.encode()
        except UnicodeEncodeError as problem:  # JSON can spell half a surrogate pair
            raise InputError(
                f"{self.place}: {name} is not valid Unicode at character {problem.start}: fix it"
            ) from problem
        return found


def read_bytes(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    name = f"workload {str(path)!r}"
    try:
        return path.read_bytes()
    except FileNotFoundError as problem:
        raise InputError(f"{name} does not exist: give the path of a file, or builtin") from problem
    except IsADirectoryError as problem:
        raise InputError(f"{name} is a folder: give a file in it") from problem
    except (OSError, ValueError) as problem:  # ValueError: a path with a NUL in it
        reason = getattr(problem, "strerror", None) or str(problem)
        raise InputError(f"{name} cannot be read: {reason}; check path and permissions") from problem


def parse(raw: bytes, path: Path) -> list[Entry]:
    """The objects of a file, at least one.

    Raises:
        InputError: it is not gzip, not UTF-8 or not JSON, or it has no objects.
    """
    name = f"workload {str(path)!r}"
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as problem:
            raise InputError(
                f"{name} is not a complete gzip file ({problem}): download it again, or unpack it"
            ) from problem
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise InputError(f"{name} is not UTF-8 at byte {problem.start}: save it as UTF-8") from problem
    entries = list(_array(text, path) if text.lstrip().startswith("[") else _lines(text, path))
    if not entries:
        raise InputError(f"{name} is empty: give one JSON object a line")
    return entries


def _lines(text: str, path: Path) -> Iterator[Entry]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{str(path)!r} line {number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise InputError(f"{place} is not JSON ({problem}): give one JSON object a line") from problem
        yield _entry(found, place, number)


def _array(text: str, path: Path) -> Iterator[Entry]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise InputError(f"{str(path)!r} begins with [ but is not a JSON array ({problem}): fix it") from problem
    for number, each in enumerate(found, start=1):
        yield _entry(each, f"{str(path)!r} item {number}", number)


def _entry(found: object, place: str, number: int) -> Entry:
    if not isinstance(found, dict):
        raise InputError(f"{place} is {_named(found)}: give a JSON object")
    return Entry(place, number, found)


_NAMES = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}


def _named(found: object) -> str:
    """Return JSON's name of a value's type."""
    if isinstance(found, list) and not found:
        return "an empty list"
    return _NAMES.get(type(found), "null")
