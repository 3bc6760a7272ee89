"""Failures of the engine: the watchdog, requests that have failed their passes, and dumps of the last requests.

A dump is for `lade serve --replay`. It is in JSON Lines: what happened, then a request per line in order of arrival. It
has texts, and no keys.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any

import msgspec

from lade.errors import InputError
from lade.files import write_whole
from lade.server.access_log import facts_of
from lade.server.errors import INVALID, ApiError
from lade.server.request_context import RequestContext
from lade.serving.snapshot import CurrentWork
from lade.version import __version__, versions

logger = logging.getLogger(__name__)

SET_UP = {
    ("lade.backends.cuda_graphs.buffers", "record"),
    ("lade.tuning.cost_cache", "measure_step_cost"),
    ("torch._dynamo.convert_frame", "__call__"),
    ("triton.compiler.compiler", "compile"),
}
"""Modules and functions that do what is done once: capture, measure and compile passes. Their time does not count."""


class Watchdog:
    """Watches the decoding thread of an engine.

    Only the time of one piece of work counts, such as one pass, however long a request takes. `limit_s` is what it may
    take, set-up aside, 0 for no limit; it may be set at any time.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = perf_counter) -> None:
        self.limit_s, self._clock = limit_s, clock
        self.reason = ""  # describes the work that takes too long
        self._began: float | None = None  # of the work that is watched
        self._looked = self._set_up_s = 0.0
        self._sets_up = False  # whether set-up was found at the last look

    def look(self, work: CurrentWork | None) -> None:
        """Look at what the engine does now; log once that it takes too long, and once that it has ended.

        The time between two looks counts as set-up if the later one finds it, so there should be several a second. The
        stack is looked at from half of the limit on.
        """
        now, began = self._clock(), None if work is None else work.began
        if began != self._began:
            if self.reason:
                logger.warning("the engine goes on after %.0f s", now - (self._began or now))
            self._began, self._looked, self._set_up_s, self.reason = began, began or now, 0.0, ""
            self._sets_up = False
        if work is None or not self.limit_s:
            return
        seconds = now - work.began - self._set_up_s
        if self._sets_up or seconds > self.limit_s / 2:
            self._sets_up = is_set_up(work.frame)
            self._set_up_s += (now - self._looked) * self._sets_up
            self._looked, seconds = now, now - work.began - self._set_up_s
        if seconds > self.limit_s and not self.reason:
            self.reason = f"{work.phase} of {len(work.rows)} rows has taken more than {self.limit_s:g} s"
            logger.error("the engine makes no progress: %s\n%s", self.reason, described(work))


def is_set_up(frame: FrameType | None) -> bool:
    """Return True if a call within `frame`'s stack does what is done once."""
    return any((each.f_globals.get("__name__"), each.f_code.co_name) in SET_UP for each, _ in _calls(frame))


def _calls(frame: FrameType | None) -> list[tuple[FrameType, int]]:
    """Return the frames of another thread's stack, innermost first, with their lines.

    A step to a caller may make an object of its frame, for which garbage may be collected, whose finalizers may let the
    other thread run on: its frames end meanwhile, and Python 3.11 crashes. So none is collected.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(traceback.walk_stack(frame)) if frame is not None else []
    finally:
        if collects:
            gc.enable()


def described(work: CurrentWork) -> str:
    """Return the sizes of the rows and the stack of the decoding thread. It has no texts."""
    rows = ", ".join(f"{prompt} + {answer}" for prompt, answer in work.rows)
    stack = "".join(reversed(traceback.StackSummary.extract(iter(_calls(work.frame))).format()))
    return f"phase {work.phase}, tokens of prompt + answer of each row: {rows or '-'}\n{stack.rstrip()}"


FINISHED = 32  # number of ended requests that are kept
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
    return {
        "received": datetime.fromtimestamp(context.received_ns / 1e9, UTC).isoformat(),
        "state": "running" if context.outcome is None else "failed" if context.problem else "done",
        **facts_of(context),
        "error": context.problem,
        "bytes": context.size,
        "body": json.loads(context.body or b"null", object_hook=_bare),
    }


def _bare(found: dict[str, Any]) -> dict[str, Any]:
    """Return an object of a body without credentials for servers of tools, which have no effect here."""
    hidden = ("authorization", "headers") if found.get("type") == "mcp" else ()
    return {name: value for name, value in found.items() if name not in hidden}


class CrashDump:
    """Keeps the last requests and writes them to a file when something has gone wrong."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder, self._model = folder, model
        self._finished = deque[dict[str, Any]](maxlen=FINISHED)
        self._written = set[str]()

    def add(self, context: RequestContext, route: str) -> None:
        """Keep an answer that has ended, whatever its route."""
        if context.endpoint:
            self._finished.append(_recorded(context))

    def write(self, kind: str, reason: str, details: str, running: Iterable[RequestContext]) -> None:
        """Write a dump, once per kind; a disk that is full costs a line in the log and nothing else.

        It begins with a line on the reason and details, which are a traceback or what the engine was doing.
        """
        if kind in self._written:
            return
        self._written.add(kind)
        try:
            # those that end meanwhile are in both, and what is known of them at the end counts
            found = {each["received"]: each for each in [*map(_recorded, running), *self._finished]}
            about = {"model": self._model, "lade": __version__, **versions()}
            lines = [{"reason": reason, "details": details, **about}]
            lines += [found[at] for at in sorted(found)]
            path = self._folder / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}-{kind}.jsonl"
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(path, "".join(f"{json.dumps(line)}\n" for line in lines))  # for its owner alone
        except Exception as problem:  # noqa: BLE001 - whatever it is, the server has other things to end
            logger.error("the last requests could not be written to %s: %s", self._folder, problem)
        else:
            logger.error("the last %d requests are in %s:  lade serve --replay  sends them again", len(found), path)


def read_dump(path: Path) -> list[DumpedRequest]:
    """Return the requests of a dump in the order of arrival; raise `InputError` if the file is no dump."""
    try:
        _, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return msgspec.convert(lines, list[DumpedRequest])
    except (OSError, ValueError) as problem:
        raise InputError(f"dump {str(path)!r}: {problem}: give a file that --crash-dump wrote") from None


class FailedRequests:
    """Remembers requests whose passes failed, so that clients' retries do not make all others' texts be fed again.

    Digesting a large body takes milliseconds, so nothing is checked while there are none.
    """

    TRIES = 2  # failures after which a request is refused
    SECONDS = 600.0  # for which failures are remembered: lack of memory may pass
    MOST = 256  # requests that are remembered; the oldest are forgotten first

    def __init__(self) -> None:
        self.known: OrderedDict[bytes, tuple[float, int]] = OrderedDict()  # last time, and number of failures

    def check(self, owner: str, body: object) -> None:
        """Raise `ApiError` for a request that has failed too often."""
        last, failures = self.known.get(_digest_of(owner, body), (0.0, 0))
        if failures >= self.TRIES and perf_counter() - last < self.SECONDS:
            why = "this request has failed the model's pass twice, each time alone: change it"
            raise ApiError(422, INVALID, f"{why}; the server's log has the reason", code="request_kills_pass")

    def add(self, owner: str, body: object) -> None:
        """Count a failure of a request; of one key, so that no other learns of it."""
        name, now = _digest_of(owner, body), perf_counter()
        last, failures = self.known.pop(name, (now, 0))
        self.known[name] = now, 1 + (failures if now - last < self.SECONDS else 0)
        while len(self.known) > self.MOST:
            self.known.popitem(last=False)


def _digest_of(owner: str, body: object) -> bytes:
    """Return a digest of a validated body, which is its messages or ids and all of its parameters."""
    return hashlib.sha256(f"{owner}\0{body!r}".encode(errors="replace")).digest()
