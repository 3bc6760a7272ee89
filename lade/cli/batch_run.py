"""The run of `lade batch`: the server's handlers answer in this process, and results are written as they complete.

A result file is its own journal, so a run that was interrupted or killed continues with `--resume`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from itertools import islice
from time import perf_counter, sleep

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from starlette.types import ASGIApp

from lade.cli.batch_files import Request, Results
from lade.cli.run import Interrupt
from lade.cli.terminal import EXIT_INTERRUPTED, Progress, Terminal
from lade.server.app import Reply, build_app, post
from lade.server.service import Service

EXIT_FAILED = 1
AHEAD = 2
"""Requests in flight per row of the batch, those that wait for a row included."""
POLL_S = 0.01


def run(service: Service, results: Results, total: int, term: Terminal) -> None:
    """Answer the requests without a result, of `total` ones, by a service that is started and closed here.

    Raises:
        Exception: whatever kept the model from being loaded.
        typer.Exit: the run was interrupted, or a request failed.
    """
    where, start = repr(str(results.path)), perf_counter()
    answered = before = total - len(results.unanswered)
    failed = 0
    if before:
        term.say(f"continuing after {before} of {total} requests", "dim")

    def stopped() -> bool:
        return interrupt.requested or bool(_breakdown(service))

    async def answer_all() -> None:
        nonlocal answered, failed
        in_flight = AHEAD * service.settings.max_rows
        async with aclosing(completed(app, results.unanswered, in_flight, stopped)) as replies:
            async for request, reply in replies:
                failed += not results.write(request, reply)
                answered += 1
                progress.update(progress.task_ids[0], completed=answered)
                term.tell_progress(f"{answered} of {total} requests")

    with Interrupt() as interrupt:
        try:
            app = build_app(service)
            with _loaded(service), _progress_bar(total, before, term) as progress:
                results.drop_failures()
                asyncio.run(answer_all())
        except KeyboardInterrupt:  # the second Ctrl-C
            interrupt.requested = True
    _conclude(service, term, where, total, answered, failed, perf_counter() - start, interrupted=interrupt.requested)


def _conclude(
    service: Service,
    term: Terminal,
    where: str,
    total: int,
    answered: int,
    failed: int,
    seconds: float,
    *,
    interrupted: bool,
) -> None:
    """Say what came of the requests, and exit unless all were answered."""
    now = service.snapshot()
    if answered < total:
        why = "interrupted" if interrupted else f"the engine failed ({_breakdown(service)})"
        done = f"{answered} of {total} requests are in {where}"
        term.say(f"{why}: {done}; the same command with --resume continues", "yellow")
        raise typer.Exit(EXIT_INTERRUPTED if interrupted else EXIT_FAILED)
    tokens = 0 if now is None else now.new_tokens
    rate = f"{tokens} tokens in {seconds:.1f} s · {tokens / seconds:.1f} tokens/s"
    term.say(f"{rate} · {where} has {total} requests", "dim")
    if failed:
        term.say(f"{failed} of {total} requests failed; the same command with --resume retries them", "yellow")
    if failed or service.unsaved is not None:
        raise typer.Exit(EXIT_FAILED)


async def completed(
    app: ASGIApp, requests: Sequence[Request], in_flight: int, stopped: Callable[[], bool]
) -> AsyncGenerator[tuple[Request, Reply]]:
    """Post requests to their endpoints, in order, and yield those that are answered; on exit the others are cancelled.

    At most `in_flight` requests are posted and not answered. `stopped` is polled: True ends the generator.
    """
    ahead, posted = iter(requests), dict[asyncio.Task[Reply], Request]()
    try:
        while not stopped():
            for request in islice(ahead, in_flight - len(posted)):
                posted[asyncio.create_task(post(app, request.url, request.body))] = request
            if not posted:
                return
            done, _ = await asyncio.wait(posted, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield posted.pop(task), task.result()
    finally:
        for task in posted:
            task.cancel()
        await asyncio.gather(*posted, return_exceptions=True)


@contextmanager
def _loaded(service: Service) -> Iterator[None]:
    """Load the model, and close the service on exit."""
    try:
        service.start()
        while service.phase == "loading" and service.problem is None:
            sleep(POLL_S)
        if service.problem is not None:
            raise service.problem
        yield
    finally:
        service.close()


def _breakdown(service: Service) -> str:
    """Return why the engine has died, if it has."""
    service.watch()
    return str(service.reason or "unknown reason") if service.phase == "dead" else ""


def _progress_bar(total: int, done: int, term: Terminal) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("requests · time left"), TimeRemainingColumn())
    progress = Progress(*columns, console=term.err, transient=True, disable=not term.animated)
    progress.add_task("requests", total=total, completed=done)
    return progress
