"""JSON as it is sent, and as it comes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from starlette.responses import Response

from lade.server.settings import MOST_OBJECTS, MOST_VALUES

_PIECE, _LARGE = 2**18, 2**16


class TooManyValuesError(ValueError):
    """JSON that would take long to read, and much memory: it has too many values."""


def encoded(value: Any) -> bytes:
    """UTF-8 without spaces. Half a character, which JSON can spell and UTF-8 cannot, becomes a question mark."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _plain(value: Any) -> str:
    """Of kinds of text that are not quite `str`, such as torch's version."""
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is no JSON")


def decoded(raw: bytes | str) -> Any:
    """What JSON means.

    Raises:
        TooManyValuesError: it has more than `MOST_OBJECTS` lists and objects, or more than `MOST_VALUES` values.
        ValueError: it is none.
        RecursionError: it is too deep.
    """
    text = raw if isinstance(raw, bytes) else raw.encode(errors="replace")
    if text.count(b"[") + text.count(b"{") > MOST_OBJECTS or text.count(b",") >= MOST_VALUES:
        _check_counts(text)
    if len(text) > _LARGE:  # Python's own reader takes halves of characters and NaN, which can be told apart later
        return msgspec.json.decode(raw)  # but of a million numbers it would hold up all threads for thrice as long
    return json.loads(raw)


def _check_counts(text: bytes) -> None:
    """Count what stands outside of strings: code that somebody quotes is one string, however many brackets it has."""
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
    objects = nexts = within = 0  # `within` is 1 in a string
    for start in range(0, len(bare), _PIECE):  # else other threads would wait for all of it
        parts = bare[start : start + _PIECE].split(b'"')
        outside = b"".join(parts[within::2])
        objects += outside.count(b"[") + outside.count(b"{")
        nexts += outside.count(b",")
        within = (within + len(parts) - 1) % 2
        if objects > MOST_OBJECTS:
            raise TooManyValuesError(f"there are more than {MOST_OBJECTS} lists and objects: send fewer")
        if nexts >= MOST_VALUES:
            raise TooManyValuesError(f"there are more than {MOST_VALUES} values: send fewer")


class Json(Response):
    """A whole answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encoded(content)
