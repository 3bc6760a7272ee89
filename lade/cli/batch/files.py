"""Request and result files of batch commands; a result file is its own journal.

Lines come in the order of the prompts, so whatever ends a run, the file has the answers to the first prompts, and a run
that continues it begins after them. A process that is killed while it writes leaves a torn last line.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from lade.cli.prompts import Prompt
from lade.errors import ConfigError, InputError
from lade.files import require_same, whole_lines, write_whole

Entry = dict[str, Any]
REMEDY = "give another --out"


class AnswerFile:
    """A file that grows by lines, one for each prompt.

    Args:
        path: of the file.
        prompts: by the numbers of their lines in the prompt file.
        resume: whether to continue what is there.

    Attributes:
        kept: the lines that are there, of the first prompts.

    Raises:
        ConfigError: nothing can be written there.
        InputError: there are lines, and they are not to be continued, or are not of these prompts.
    """

    def __init__(self, path: Path, prompts: Mapping[int, Prompt], *, resume: bool) -> None:
        check_place(path)
        self.path, self.kept = path, list[Entry]()
        raw = path.read_bytes() if path.exists() else b""
        if raw and not resume:
            raise InputError(f"{str(path)!r} has lines already: continue with --resume, or {REMEDY}")
        self.kept, self._whole = whole_lines(raw, path)
        if len(self.kept) > len(prompts):
            raise InputError(f"{str(path)!r} has {len(self.kept)} lines for {len(prompts)} prompts: {REMEDY}")
        wanted = [{"line": line, **prompt.as_dict()} for line, prompt in prompts.items()]
        for number, (entry, here) in enumerate(zip(self.kept, wanted, strict=False), start=1):
            require_same({name: entry.get(name) for name in here}, here, self._place(number))
        self._check_torn(raw[self._whole :], next(islice(wanted, len(self.kept), None), {}))

    @property
    def seed(self) -> int | None:
        """What the lines were drawn with, if they were."""
        seed = self.kept[0].get("seed") if self.kept else None
        return seed if isinstance(seed, int) else None

    @property
    def failed(self) -> list[int]:
        """Numbers of the prompts that have an error for an answer."""
        return [entry["line"] for entry in self.kept if "error" in entry]

    def require(self, terms: Mapping[str, Any]) -> None:
        """Raise `InputError` if a line that is there was made on other terms; the first difference is named."""
        for number, entry in enumerate(self.kept, start=1):
            require_same({name: entry.get(name) for name in terms}, dict(terms), self._place(number))

    def begin(self) -> None:
        """Make it ready for more lines; a torn last one is cut off."""
        self.path.touch()
        os.truncate(self.path, self._whole)

    def add(self, entry: Entry) -> None:
        """Append a line; the operating system has it at once, so that killing the process does not lose it."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(entry))
        except OSError as problem:
            raise InputError(f"{str(self.path)!r} cannot be written ({problem}): mend that, then --resume") from problem

    def mend(self, entries: Mapping[int, Entry]) -> None:
        """Put answers, by the numbers of their prompts, in the place of errors; the file is replaced as a whole."""
        self.kept = [entries.get(entry["line"], entry) for entry in self.kept]
        write_whole(self.path, "".join(map(_line, self.kept)))

    def _place(self, number: int) -> str:
        return f"line {number} of {str(self.path)!r}"

    def _check_torn(self, torn: bytes, here: Mapping[str, Any]) -> None:
        """What has no end must be the beginning of the next line, or it is not ours to cut off."""
        beginning = json.dumps(here)[:-1].encode()
        if torn[: len(beginning)] != beginning[: len(torn)]:
            raise InputError(
                f"{str(self.path)!r} ends with something else than a line for one of the prompts: {REMEDY}"
            )


def check_place(path: Path) -> None:
    """Raise `ConfigError` where no file can be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError("out", str(path), f"the folder {folder} does not exist: create it")
    if path.exists() and not path.is_file():
        raise ConfigError("out", str(path), "it is no regular file: give the name of a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError("out", str(path), "it cannot be written to: check its permissions")


def _line(entry: Entry) -> str:
    return json.dumps(entry) + "\n"


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
