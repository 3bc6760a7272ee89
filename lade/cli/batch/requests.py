"""Request files in the format of OpenAI's batch API."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lade.cli.prompts import read_utf8
from lade.errors import InputError

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Request:
    """A request of a batch file.

    Attributes:
        custom_id: name of the request, unique in the file.
        url: endpoint, one of `URLS`.
        body: JSON body for the endpoint.
        number: line number in the file, from 1.
    """

    custom_id: str
    url: str
    body: dict[str, Any] = field(repr=False)
    number: int = 0

    @property
    def id(self) -> str:
        """Id of the result line: a hash of the request, so that it is the same in every run."""
        content = json.dumps([self.custom_id, self.url, self.body], sort_keys=True)
        return f"batch_req_{hashlib.sha256(content.encode()).hexdigest()[:32]}"


def read(path: Path) -> list[Request]:
    """Return all requests of a file, skipping empty lines.

    Raises:
        InputError: the file cannot be read, a line is no request, or a `custom_id` occurs twice.
    """
    requests = list(_parsed(read_utf8(path, "request file").split("\n"), path))
    if not requests:
        raise InputError(f"{str(path)!r} has no requests: write one per line")
    lines_of: dict[str, int] = {}
    for request in requests:
        before = lines_of.setdefault(request.custom_id, request.number)
        if before != request.number:
            why = f"custom_id {request.custom_id[:_LONGEST_SHOWN]!r} is used by line {before}: make it unique"
            raise InputError(f"{str(path)!r} line {request.number}: {why}")
    return requests


def _parsed(lines: list[str], path: Path) -> Iterator[Request]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"{str(path)!r} line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise InputError(f"{place} is no JSON ({problem}): write one object per line") from None
        yield _request(value, place, number)


def _request(value: Any, place: str, number: int) -> Request:
    if not isinstance(value, dict):
        raise InputError(f"{place} is no object: write custom_id, method, url and body")
    custom_id, url, body = value.get("custom_id"), value.get("url"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        raise InputError(f"{place}: custom_id is {_shown(custom_id)}: give a string")
    if value.get("method") != "POST":
        raise InputError(f'{place}: method is {_shown(value.get("method"))}: give "POST"')
    if url not in URLS:
        raise InputError(f"{place}: url is {_shown(url)}: give one of {', '.join(URLS)}")
    if not isinstance(body, dict):
        raise InputError(f"{place}: body is {_shown(body)}: give an object")
    if body.get("stream"):
        raise InputError(f"{place}: body.stream is {_shown(body['stream'])}: batch responses are not streamed")
    return Request(custom_id, url, body, number)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return "missing" if value is None else text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."
