"""Result files of both batch formats: JSON Lines, appended to as results complete, continued with `--resume`.

A process that is killed while it writes leaves a torn last line, which the next run cuts off.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from lade.cli.batch.requests import Request
from lade.cli.options.grouping import check_out
from lade.cli.prompts import Prompt
from lade.errors import InputError
from lade.files import require_same, whole_lines, write_whole

Entry = dict[str, Any]
REMEDY = "give another --out"
_OK = 200


class ResultFile:
    """A JSON Lines file that grows by one line per result.

    Args:
        path: location of the file; its folder has to exist.
        resume: accept a file that has lines, and continue it.

    Attributes:
        lines: complete lines that were found, parsed.
        torn: bytes after the last complete line.

    Raises:
        ConfigError: the path cannot be written.
        InputError: the file has lines and `resume` is False, or a line is no JSON object.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        check_out(path)
        raw = path.read_bytes() if path.exists() else b""
        if raw and not resume:
            raise InputError(f"{str(path)!r} exists and has lines: continue it with --resume, or {REMEDY}")
        self.path = path
        self.lines, self._whole = whole_lines(raw, path)
        self.torn = raw[self._whole :]

    def truncate(self) -> None:
        """Create the file, or cut off a torn last line."""
        self.path.touch()
        os.truncate(self.path, self._whole)

    def append(self, line: Entry) -> None:
        """Append a line and hand it to the operating system, so that killing the process does not lose it."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_encoded(line))
        except OSError as problem:
            raise InputError(f"{str(self.path)!r} cannot be written ({problem}): fix that, then --resume") from problem

    def replace(self, lines: Sequence[Entry]) -> None:
        """Replace the file atomically."""
        write_whole(self.path, "".join(map(_encoded, lines)))

    def _place(self, number: int) -> str:
        return f"line {number} of {str(self.path)!r}"


class PromptResults(ResultFile):
    """Results of a prompt file, one line per prompt, in the order of the prompts.

    Args:
        path: as in `ResultFile`.
        prompts: all prompts of this run by their line numbers in the prompt file.
        resume: as in `ResultFile`.

    Raises:
        InputError: also if the lines are results of other prompts.
    """

    def __init__(self, path: Path, prompts: Mapping[int, Prompt], *, resume: bool) -> None:
        super().__init__(path, resume=resume)
        if len(self.lines) > len(prompts):
            raise InputError(f"{str(path)!r} has {len(self.lines)} lines for {len(prompts)} prompts: {REMEDY}")
        wanted = [{"line": line, **prompt.as_dict()} for line, prompt in prompts.items()]
        for number, (entry, here) in enumerate(zip(self.lines, wanted, strict=False), start=1):
            require_same({name: entry.get(name) for name in here}, here, self._place(number))
        self._check_torn(next(islice(wanted, len(self.lines), None), {}))

    @property
    def seed(self) -> int | None:
        """Seed recorded in the file; None without lines, or for greedy decoding."""
        seed = self.lines[0].get("seed") if self.lines else None
        return seed if isinstance(seed, int) else None

    @property
    def failed(self) -> list[int]:
        """Line numbers of the prompts whose result is an error."""
        return [entry["line"] for entry in self.lines if "error" in entry]

    def require(self, terms: Mapping[str, Any]) -> None:
        """Raise `InputError`, naming the first difference, if a line was generated with other settings."""
        for number, entry in enumerate(self.lines, start=1):
            require_same({name: entry.get(name) for name in terms}, dict(terms), self._place(number))

    def amend(self, results: Mapping[int, Entry]) -> None:
        """Replace the results of some prompts, by their line numbers, in place; other lines stay."""
        self.lines = [results.get(entry["line"], entry) for entry in self.lines]
        self.replace(self.lines)
        self._whole = self.path.stat().st_size

    def _check_torn(self, here: Mapping[str, Any]) -> None:
        """Raise `InputError` unless the torn line is the beginning of the next result: else it is not ours to cut."""
        beginning = json.dumps(here)[:-1].encode()
        if self.torn[: len(beginning)] != beginning[: len(self.torn)]:
            raise InputError(f"{str(self.path)!r} ends with something other than a result of a prompt: {REMEDY}")


class RequestResults(ResultFile):
    """Results of an OpenAI batch file, in the order of completion, matched by `custom_id`.

    Args:
        path: as in `ResultFile`.
        requests: all requests of this run.
        resume: as in `ResultFile`.

    Attributes:
        unanswered: requests without a successful response.

    Raises:
        InputError: also if a line answers none of the requests.
    """

    def __init__(self, path: Path, requests: Sequence[Request], *, resume: bool) -> None:
        super().__init__(path, resume=resume)
        ids = {request.custom_id: request.id for request in requests}
        for number, line in enumerate(self.lines, start=1):
            name = line.get("custom_id")
            if name not in ids or line.get("id") != ids[name]:
                why = "that request has changed" if name in ids else "there is no such request"
                raise InputError(f"{self._place(number)} has custom_id {name!r}, and {why}: {REMEDY}")
        self._succeeded = [line for line in self.lines if is_success(line)]
        answered = {line["custom_id"] for line in self._succeeded}
        self.unanswered = [request for request in requests if request.custom_id not in answered]

    def drop_failures(self) -> None:
        """Rewrite the file without failed responses and without a torn last line."""
        self.replace(self._succeeded)


def is_success(line: Entry) -> bool:
    """Return True for a line of an OpenAI result file with HTTP status 200."""
    response = line.get("response")
    return isinstance(response, dict) and response.get("status_code") == _OK


def _encoded(line: Entry) -> str:
    return json.dumps(line) + "\n"
