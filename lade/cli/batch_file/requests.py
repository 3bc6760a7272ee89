"""Requests in a file, as OpenAI's batch API takes them: `custom_id`, `method`, `url`, `body`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lade.errors import InputError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        custom_id: its name, which no other request of the file has.
        url: what it asks, one of `URLS`.
        body: what it says.
        number: of its line, for messages.
    """

    custom_id: str
    url: str
    body: dict[str, Any] = field(repr=False)
    number: int = 0

    @property
    def id(self) -> str:
        """What the answer to it, and to no other one, is called: of what it says, not of when it is asked."""
        said = json.dumps([self.custom_id, self.url, self.body], sort_keys=True)
        return f"batch_req_{hashlib.sha256(said.encode()).hexdigest()[:32]}"


def read(path: Path) -> list[Request]:
    """All requests of a file; empty lines are none.

    Raises:
        InputError: it cannot be read, or a line is no request, or has the `custom_id` of another one.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8"
        raise InputError(f"request file {str(path)!r} cannot be read: {reason}; check path and permissions") from None
    found = list(_requests(lines, path))
    if not found:
        raise InputError(f"{str(path)!r} has no requests: write one a line")
    lines_of: dict[str, int] = {}
    for request in found:
        before = lines_of.setdefault(request.custom_id, request.number)
        if before != request.number:
            why = f"custom_id {request.custom_id[:_LONGEST_SHOWN]!r} is that of line {before}: give each its own"
            raise InputError(f"{str(path)!r} line {request.number}: {why}")
    return found


def _requests(lines: list[str], path: Path) -> Iterator[Request]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{str(path)!r} line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise InputError(f"{place} is no JSON ({problem}): write one object a line") from None
        yield _request(value, place, number)


def _request(value: Any, place: str, number: int) -> Request:
    """Raises `InputError` for what is none."""
    if not isinstance(value, dict):
        raise InputError(f"{place} is no object: write custom_id, method, url and body")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise InputError(f"{place}: custom_id is {_shown(custom_id)}: give a text")
    if value.get("method") != "POST":
        raise InputError(f'{place}: method is {_shown(value.get("method"))}: give "POST"')
    if url not in URLS:
        raise InputError(f"{place}: url is {_shown(url)}: give one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise InputError(f"{place}: body is {_shown(body)}: give an object")
    if body.get("stream"):
        raise InputError(f"{place}: body.stream is {_shown(body['stream'])}: leave it out, answers are written whole")
    return Request(custom_id, url, body, number)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return "missing" if value is None else text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
