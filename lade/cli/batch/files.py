"""Files of both batch formats, and the options that name them: requests or prompts, shards, results.

Requests are in the format of OpenAI's batch API. Results are JSON Lines, appended as they complete and
continued with `--resume`. A process that is killed while it writes leaves a torn last line, which the next run cuts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from lade.cli.options.grouping import check_out, options_in
from lade.cli.prompts import Prompt, PromptSource, numbered_prompts, read_utf8
from lade.errors import ConfigError, InputError
from lade.files import require_same, write_whole

T = TypeVar("T")

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


def read_requests(path: Path) -> list[Request]:
    """Return all requests of a file, skipping empty lines.

    Raises:
        InputError: the file cannot be read, a line is not a request, or a `custom_id` occurs twice.
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
            raise InputError(f"{place} is not JSON ({problem}): write one object per line") from None
        yield _request(value, place, number)


def _request(value: Any, place: str, number: int) -> Request:
    if not isinstance(value, dict):
        raise InputError(f"{place} is not an object: write custom_id, method, url and body")
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
        InputError: the file has lines and `resume` is False, or a line is not a JSON object.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        check_out(path)
        raw = path.read_bytes() if path.exists() else b""
        if raw and not resume:
            raise InputError(f"{str(path)!r} exists and has lines: continue it with --resume, or {REMEDY}")
        self.path = path
        self.lines, self._whole = _whole_lines(raw, path)
        self.torn = raw[self._whole :]

    def truncate(self) -> None:
        """Create the file, or cut off a torn last line."""
        with self._writing():
            self.path.touch()
            os.truncate(self.path, self._whole)

    def append(self, line: Entry) -> None:
        """Append a line and flush it, so that killing the process does not lose it."""
        with self._writing(), self.path.open("a", encoding="utf-8") as file:
            file.write(_encoded(line))

    def replace(self, lines: Sequence[Entry]) -> None:
        """Replace the file atomically."""
        with self._writing():
            write_whole(self.path, "".join(map(_encoded, lines)))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as problem:
            raise InputError(f"{str(self.path)!r} cannot be written ({problem}): fix that, then --resume") from problem

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
        """Raise `InputError` unless the torn line is the beginning of the next result."""
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


MAX_ROWS = 4096
_MAX_SHARDS = 10**6
_SHARD = re.compile(r"(\d{1,7})/(\d{1,7})")
_PANEL = "Batches"
_option = options_in(_PANEL)

ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        rich_help_panel=_PANEL,
        help="Take every N-th line of the file only, from the I-th on: 1/4, ..., 4/4.",
    ),
]


@dataclass(frozen=True)
class Shard:
    """One of several disjoint parts of a file, each for a process of its own.

    Attributes:
        index: number of the part, from 1.
        count: number of parts.
    """

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        """Return the shard that `--shard` names; None is the whole file.

        Raises:
            ConfigError: the text is not I/N with 1 <= I <= N.
        """
        if text is None:
            return cls()
        match = _SHARD.fullmatch(text)
        shard = cls(*map(int, match.groups())) if match else cls(0, 0)
        if not 1 <= shard.index <= shard.count <= _MAX_SHARDS:
            raise ConfigError("shard", text[:40], "give I/N with 1 <= I <= N, such as 2/4")
        return shard

    def select(self, items: Sequence[T]) -> list[T]:
        """Return the items of this shard; lines appended to the file later do not move earlier ones."""
        return list(items[self.index - 1 :: self.count])


@dataclass(frozen=True)
class Batch:
    """Prompts of a file that are decoded together.

    Attributes:
        source: the prompt file.
        prompts: prompts of this shard by their line numbers, from 1.
        size: number of prompts decoded at a time.
        file: result file; None for standard output.
    """

    source: Path
    prompts: dict[int, Prompt]
    size: int
    file: PromptResults | None

    @property
    def seed(self) -> int | None:
        """Seed of the run that is continued, if any."""
        return None if self.file is None else self.file.seed

    def place(self, line: int) -> str:
        """Return the location of a prompt for messages."""
        return f"{str(self.source)!r} line {line}"


@dataclass(frozen=True)
class BatchOptions:
    """Options for prompt files."""

    batch_size: int | None = _option(None, "B", "Decode B prompts of a .jsonl file at a time; results are JSON lines.")
    out: Path | None = _option(None, "FILE", "Write the results to this file.")
    resume: bool = _option(False, "", "Continue the run that wrote --out.", "--resume")
    shard: ShardOption = None

    def batch(self, source: PromptSource) -> Batch | None:
        """Return the batch that the options describe; None without `--batch-size`.

        Raises:
            ConfigError, InputError: the options contradict each other, or a file cannot be used.
        """
        size, file = self.batch_size, source.prompts
        if size is None:
            given = {"--out": self.out is not None, "--resume": self.resume, "--shard": self.shard is not None}
            for name in (name for name, value in given.items() if value):
                raise InputError(f"{name} needs --batch-size")
            return None
        if not 1 <= size <= MAX_ROWS:
            raise ConfigError("batch-size", size, f"give a whole number from 1 to {MAX_ROWS}")
        source.check()
        if file is None or file.suffix != ".jsonl":
            raise ConfigError("batch-size", size, "needs --prompts FILE.jsonl, with a prompt on each line")
        if self.resume and self.out is None:
            raise InputError("--resume needs --out FILE")
        shard = Shard.parse(self.shard)
        prompts = dict(shard.select(list(numbered_prompts(file).items())))
        results = None if self.out is None else PromptResults(self.out, prompts, resume=self.resume)
        return Batch(file, prompts, size, results)


def _whole_lines(raw: bytes, path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines and their length in bytes. A torn last line, left by a killed process, is skipped.

    Raises:
        InputError: a complete line is not a JSON object.
    """
    whole = raw.rfind(b"\n") + 1
    lines = []
    for number, line in enumerate(raw[:whole].split(b"\n")[:-1], start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise InputError(f"{str(path)!r} is damaged at line {number} ({problem}): give another --out") from problem
        if not isinstance(found, dict):
            raise InputError(f"{str(path)!r} is damaged at line {number} (no object): give another --out")
        lines.append(found)
    return lines, whole
