"""Crash dumps: the last requests, in a file, once the engine has failed or hangs, for `lade serve --replay`.

A dump is in JSON Lines: what happened, then a request per line in the order of arrival. It has texts, and no keys.
"""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from lade.errors import InputError
from lade.files import write_whole
from lade.server.access_log import facts_of
from lade.server.request_context import RequestContext
from lade.version import __version__

logger = logging.getLogger(__name__)
FINISHED = 32
"""Number of ended requests that are kept."""
LONGEST_BODY = 2**20
"""Bytes up to which the body of a request is kept; of a longer one the dump has the size alone."""


class DumpedRequest(msgspec.Struct):
    """The part of a dumped request that is needed to send it again."""

    id: str
    key: str
    path: str
    end: str | None
    body: dict[str, Any] | None


def _recorded(context: RequestContext) -> dict[str, Any]:
    at = context.in_flight
    assert at is not None  # only those of the engine are dumped
    return {
        "received": datetime.fromtimestamp(context.received_ns / 1e9, UTC).isoformat(),
        "state": "running" if at.outcome is None else "failed" if at.problem else "done",
        **facts_of(context),
        "error": at.problem,
        "bytes": context.size,
        "body": json.loads(context.body or b"null", object_hook=_bare),
    }


def _bare(found: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a body without credentials for servers of tools, which have no effect here."""
    hidden = ("authorization", "headers") if found.get("type") == "mcp" else ()
    return {name: value for name, value in found.items() if name not in hidden}


class CrashDump:
    """Keeps the last requests and writes them to a file when something has gone wrong.

    Args:
        folder: folder of the dumps; made when it is needed.
        model: name of the served model.
    """

    def __init__(self, folder: Path, model: str) -> None:
        self._folder, self._model = folder, model
        self._finished = deque[dict[str, Any]](maxlen=FINISHED)
        self._written = set[str]()

    def add(self, context: RequestContext, route: str) -> None:
        """Keep an answer that has ended, whatever its route."""
        if context.in_flight is not None:
            self._finished.append(_recorded(context))

    def write(self, kind: str, reason: str, details: str, running: Iterable[RequestContext]) -> None:
        """Write a dump, once per kind; a disk that is full costs a line in the log and nothing else.

        Args:
            kind: "dead", "stuck" or "ended", for the name of the file.
            reason: a line about it.
            details: traceback, or what the engine was doing.
            running: requests without an answer so far.
        """
        if kind in self._written:
            return
        self._written.add(kind)
        try:
            # those that end meanwhile are in both, and what is known of them at the end counts
            found = {each["received"]: each for each in [*map(_recorded, running), *self._finished]}
            versions = {"lade": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
            lines = [{"reason": reason, "details": details, "model": self._model, **versions}]
            lines += [found[at] for at in sorted(found)]
            path = self._folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}-{kind}.jsonl"
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, "".join(f"{json.dumps(line)}\n" for line in lines))  # for its owner alone
        except Exception as problem:  # noqa: BLE001 - whatever it is, the server has other things to end
            logger.error("the last requests could not be written to %s: %s", self._folder, problem)
        else:
            logger.error("the last %d requests are in %s:  lade serve --replay  sends them again", len(found), path)


def read_dump(path: Path) -> list[DumpedRequest]:
    """Return the requests of a dump in the order of arrival.

    Raises:
        InputError: the file cannot be read, or is no dump.
    """
    try:
        _, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return msgspec.convert(lines, list[DumpedRequest])
    except (OSError, ValueError) as problem:
        raise InputError(f"dump {str(path)!r}: {problem}: give a file that --crash-dump wrote") from None
