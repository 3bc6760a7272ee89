"""Files of `lade batch`: requests, shards of them, and results.

Requests are in the format of OpenAI's batch API, or prompts. Results are JSON Lines, appended as they complete and
continued with `--resume`. A process that is killed while it writes leaves a torn last line, which the next run cuts.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lade import ConfigError, InputError
from lade.cli.options import check_out
from lade.cli.prompts import json_lines, read_utf8
from lade.files import write_whole

if TYPE_CHECKING:
    from lade.server.app import Reply

T = TypeVar("T")

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, TEXT, "/v1/responses")
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class Request:
    """A request of a batch file."""

    custom_id: str  # unique in the file
    url: str  # one of `URLS`
    body: dict[str, Any] = field(repr=False)
    number: int = 0  # of its line, from 1

    @property
    def id(self) -> str:
        """Id of the result line: a hash of the request, so that it is the same in every run."""
        content = json.dumps([self.custom_id, self.url, self.body], sort_keys=True)
        return f"batch_req_{hashlib.sha256(content.encode()).hexdigest()[:32]}"


def read_requests(path: Path) -> list[Request]:
    """Return all requests of a file, skipping empty lines; or raise `InputError`, also for a `custom_id` used twice."""
    lines = json_lines(read_utf8(path, "request file"), path, "write one object per line")
    requests = [_request(value, place, number) for number, place, value in lines]
    if not requests:
        raise InputError(f"{str(path)!r} has no requests: write one per line")
    lines_of: dict[str, int] = {}
    for request in requests:
        before = lines_of.setdefault(request.custom_id, request.number)
        if before != request.number:
            why = f"custom_id {request.custom_id[:_LONGEST_SHOWN]!r} is used by line {before}: make it unique"
            raise InputError(f"{str(path)!r} line {request.number}: {why}")
    return requests


def _request(value: Any, place: str, number: int) -> Request:
    if not isinstance(value, dict):
        raise InputError(f"{place} is not an object: write custom_id, method, url and body")
    if "custom_id" not in value and ("messages" in value or "prompt" in value):  # a prompt is the body of a request
        made = {"custom_id": str(number), "method": "POST", "url": CHAT if "messages" in value else TEXT, "body": value}
        return _request(made, place, number)
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


_REMEDY = "give another --out"
_OK = 200


class Results:
    """Results in a JSON Lines file, in the order of completion, matched by `custom_id`.

    With `resume` a file that has lines is continued.

    Raises:
        ConfigError: the path cannot be written.
        InputError: the file has lines and `resume` is False, or a line is not a JSON object, or answers none of the
            requests.
    """

    def __init__(self, path: Path, requests: Sequence[Request], *, resume: bool) -> None:
        check_out(path)
        raw = path.read_bytes() if path.exists() else b""
        if raw and not resume:
            raise InputError(f"{str(path)!r} exists and has lines: continue it with --resume, or {_REMEDY}")
        self.path = path
        ids = {request.custom_id: request.id for request in requests}
        self._succeeded = []
        for number, line in enumerate(_whole_lines(raw, path), start=1):
            name = line.get("custom_id")
            if name not in ids or line.get("id") != ids[name]:
                why = "that request has changed" if name in ids else "there is no such request"
                place = f"line {number} of {str(path)!r}"
                raise InputError(f"{place} has custom_id {name!r}, and {why}: {_REMEDY}")
            if _is_success(line):
                self._succeeded.append(line)
        answered = {line["custom_id"] for line in self._succeeded}
        self.unanswered = [each for each in requests if each.custom_id not in answered]  # or not successfully

    def drop_failures(self) -> None:
        """Rewrite the file, atomically, without failed responses and without a torn last line."""
        with self._writing():
            write_whole(self.path, "".join(f"{json.dumps(line)}\n" for line in self._succeeded))

    def write(self, request: Request, reply: Reply) -> bool:
        """Append the response to a request, so that killing the process does not lose it; return False if it failed."""
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
        line = {"id": request.id, "custom_id": request.custom_id, "response": response, "error": None}
        with self._writing(), self.path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(line)}\n")
        return _is_success(line)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise InputError(f"{str(self.path)!r} cannot be written ({problem}): fix that, then --resume") from problem


def _is_success(line: dict[str, Any]) -> bool:
    """Return True for a line of an OpenAI result file with HTTP status 200."""
    response = line.get("response")
    return isinstance(response, dict) and response.get("status_code") == _OK


def _whole_lines(raw: bytes, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines; a torn last one, left by a killed process, is skipped. Others must be JSON objects."""
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise InputError(f"{str(path)!r} is damaged at line {number} ({problem}): {_REMEDY}") from problem
        if not isinstance(found, dict):
            raise InputError(f"{str(path)!r} is damaged at line {number} (no object): {_REMEDY}")
        yield found


_MAX_SHARDS = 10**6
_SHARD = re.compile(r"(\d{1,7})/(\d{1,7})")


def sharded(items: Sequence[T], text: str | None) -> list[T]:
    """Return every N-th item, from the I-th on, of a `--shard` I/N; all of them for None.

    Lines appended to the file later do not move earlier ones.
    """
    if text is None:
        return list(items)
    match = _SHARD.fullmatch(text)
    index, count = map(int, match.groups()) if match else (0, 0)
    if not 1 <= index <= count <= _MAX_SHARDS:
        raise ConfigError("shard", text[:40], "give I/N with 1 <= I <= N, such as 2/4")
    return list(items[index - 1 :: count])
