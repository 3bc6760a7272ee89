"""JSON as it is sent."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


def encoded(value: Any) -> bytes:
    """UTF-8 without spaces. Half a character, which JSON can spell and UTF-8 cannot, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


class Json(Response):
    """A whole answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encoded(content)
