"""Execution of `lade batch`: requests through the server's handlers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import typer
from fastapi import FastAPI
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from lade.cli.batch.files import Request, check_place
from lade.cli.run import Interrupt
from lade.cli.terminal import EXIT_INTERRUPTED, Progress, Terminal
from lade.errors import InputError
from lade.files import whole_lines, write_whole
from lade.server.app import build_app
from lade.server.in_process import Reply, post
from lade.server.service import Service

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


EXIT_FAILED = 1
AHEAD = 2
"""Times the rows: how many requests are under way at a time, those that wait for a row included."""
_POLL_S = 0.05


def carry_out(service: Service, file: ResultFile, total: int, term: Terminal) -> None:
    """Answer what has no answer yet, and tell what came of it.

    Args:
        service: not yet started; it is closed at the end.
        file: where answers go.
        total: number of requests, those with an answer included.
        term: for what is said.

    Raises:
        Exception: what kept the model from being loaded.
        typer.Exit: Ctrl-C was pressed, a request failed, or what was learned could not be saved.
    """
    before, failed, start = total - len(file.rest), 0, perf_counter()
    if before:
        term.say(f"continuing after {before} of {total} requests", "dim")
    answered = before
    with Interrupt() as interrupt:
        try:
            _load(service)
            file.begin()
            with _progress(term, total, answered) as progress:

                def take(request: Request, reply: Reply) -> None:
                    nonlocal answered, failed
                    failed += not file.add(request, reply)
                    answered += 1
                    progress.update(progress.task_ids[0], completed=answered)

                app, ahead = build_app(service), AHEAD * service.settings.max_rows
                asyncio.run(_answer(app, file.rest, take, ahead, lambda: interrupt.requested or _is_dead(service)))
        except KeyboardInterrupt:  # the second one, which waits for nothing
            interrupt.requested = True
        finally:
            new = _new_tokens(service)
            service.close()
    if answered < total:
        why = "interrupted" if interrupt.requested else f"the engine broke down ({service.reason})"
        term.say(f"{why}: {answered} of {total} requests have an answer; --resume continues", "yellow")
        raise typer.Exit(EXIT_INTERRUPTED if interrupt.requested else EXIT_FAILED)
    seconds = perf_counter() - start
    term.say(f"{total - before} requests in {seconds:.1f} s · {new} tokens · {str(file.path)!r} is complete", "dim")
    if service.unsaved is not None:
        raise typer.Exit(EXIT_FAILED)
    if failed:
        term.say(f"{failed} of {total} requests failed; --resume asks them again", "yellow")
        raise typer.Exit(EXIT_FAILED)


def _load(service: Service) -> None:
    service.start()
    while service.phase == "loading" and service.problem is None:
        sleep(_POLL_S)
    if service.problem is not None:
        raise service.problem


def _is_dead(service: Service) -> bool:
    service.watch()
    return service.phase == "dead"


def _new_tokens(service: Service) -> int:
    now = service.snapshot()
    return 0 if now is None else now.new_tokens


async def _answer(
    app: FastAPI,
    requests: Iterable[Request],
    take: Callable[[Request, Reply], None],
    at_a_time: int,
    stopped: Callable[[], bool],
) -> None:
    """Ask all, so many at a time, and hand answers on as they come; what is under way when it is stopped is dropped."""
    ahead = iter(requests)
    asked: dict[asyncio.Task[Reply], Request] = {}
    try:
        while not stopped():
            for request in islice(ahead, at_a_time - len(asked)):
                asked[asyncio.create_task(post(app, request.url, request.body))] = request
            if not asked:
                return
            done, _ = await asyncio.wait(asked, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                take(asked.pop(task), task.result())
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


def _progress(term: Terminal, total: int, completed: int) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("requests · time left"), TimeRemainingColumn())
    progress = Progress(*columns, console=term.err, transient=True, disable=not term.animated)
    progress.add_task("requests", total=total, completed=completed)
    return progress
