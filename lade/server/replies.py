"""JSON as it is sent."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from starlette.responses import Response


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


class Json(Response):
    """A whole answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encoded(content)
