"""The file that `lade batch` writes, in the order in which answers are whole. It is its own journal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lade.cli.batch.output import check_place
from lade.cli.batch_file.requests import Request
from lade.errors import InputError
from lade.files import whole_lines, write_whole
from lade.server.in_process import Reply

_REMEDY = "give another --out"
_GOOD = 200


class ResultFile:
    """A file that grows by lines, one for each request.

    Args:
        path: of the file.
        requests: that are to be answered.
        resume: whether to continue what is there.

    Attributes:
        rest: requests that have no good answer yet.

    Raises:
        ConfigError: nothing can be written there.
        InputError: there are lines, and they are not to be continued, or are not of these requests.
    """

    def __init__(self, path: Path, requests: Sequence[Request], *, resume: bool) -> None:
        check_place(path)
        self.path = path
        raw = path.read_bytes() if path.exists() else b""
        if raw and not resume:
            raise InputError(f"{str(path)!r} has lines already: continue with --resume, or {_REMEDY}")
        lines, _ = whole_lines(raw, path)
        ids = {request.custom_id: request.id for request in requests}
        for number, line in enumerate(lines, start=1):
            name = line.get("custom_id")
            if name not in ids or line.get("id") != ids[name]:
                why = "has not asked that" if name in ids else "has no such custom_id"
                raise InputError(
                    f"line {number} of {str(path)!r} answers {name!r}, and the request file {why}: {_REMEDY}"
                )
        self._kept = [line for line in lines if _is_good(line)]
        answered = {line["custom_id"] for line in self._kept}
        self.rest = [request for request in requests if request.custom_id not in answered]

    def begin(self) -> None:
        """Make it ready for more lines: a torn last one goes, and so do answers that were errors, to be asked anew."""
        write_whole(self.path, "".join(map(_line, self._kept)))

    def add(self, request: Request, reply: Reply) -> bool:
        """Append an answer; whether it is a good one. Killing the process later does not lose it.

        Raises:
            InputError: it cannot be written.
        """
        response = {"status_code": reply.status, "request_id": reply.request_id, "body": reply.body}
        line = {"id": request.id, "custom_id": request.custom_id, "response": response, "error": None}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(line))
        except OSError as problem:
            raise InputError(f"{str(self.path)!r} cannot be written ({problem}): mend that, then --resume") from problem
        return _is_good(line)


def _is_good(line: dict[str, Any]) -> bool:
    response = line.get("response")
    return isinstance(response, dict) and response.get("status_code") == _GOOD


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"
