"""`lade batch`: answer a file of requests in the format of OpenAI's batch API.

The server's handlers answer in this process, and results are written as they complete. A result file is its own
journal, so a run that was interrupted or killed continues with `--resume`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import MISSING, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from lade.cli.batch_files import Request, Results, read_requests, sharded
from lade.cli.options import decoding as options
from lade.cli.options import option
from lade.cli.serve import EngineLimits, ServedTemplate, check_all, load_served, served_names
from lade.cli.terminal import EXIT_INTERRUPTED, Progress, Terminal, terminal

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from lade.server.app import Reply
    from lade.server.service import Service

EXAMPLE = "Example:  [bold]lade batch -i requests.jsonl -o results.jsonl --model Qwen/Qwen3-0.6B[/bold]"
_MAX_BODY = 2**30


@dataclass(frozen=True)
class Files:
    """Request and result files."""

    input: Path = option(MISSING, "FILE", "OpenAI batch file, or prompts, one per line.", "--input", "-i")
    out: Path = option(MISSING, "FILE", "Write the results to this file.", "--out", "-o")
    resume: bool = option(False, "", "Continue the run that wrote --out.", "--resume")
    shard: str | None = option(None, "I/N", "Take every N-th line only, from the I-th on: 1/4, ..., 4/4.")
    name: list[str] | None = option(
        None, "NAME", "Model name in requests. Repeatable. Default: from --model.", "--name"
    )


@options.grouped
def batch(
    *,
    files: Files,
    limits: EngineLimits,
    template: ServedTemplate,
    speed: options.Speed,
    loading: options.Loading,
    output: options.Output,
) -> None:
    """Answer a file of requests in the format of OpenAI's batch API, or of prompts, with the answers of lade serve.

    Results are written as they complete, matched by custom_id; an interrupted run keeps them.

    Exit code 1: a request failed. --resume retries failed requests and answers those without a result.
    """
    with terminal(output) as term:
        check_all(limits, loading=loading, speed=speed, template=template)
        wanted = sharded(read_requests(files.input), files.shard)
        results = Results(files.out, wanted, resume=files.resume)
        if not results.unanswered:
            results.drop_failures()
            term.say(f"{str(results.path)!r} is complete: {len(wanted)} requests", "dim")
            return
        chat_template = template.text()
        from lade.server.service import Service
        from lade.server.settings import MAX_CHOICES, MAX_PROMPTS, Settings

        settings = Settings(
            names=served_names(files.name, loading),
            max_rows=limits.max_rows,
            max_waiting=2 * limits.max_rows * MAX_CHOICES * MAX_PROMPTS,
            max_tokens=limits.max_tokens,
            answer_tokens=limits.answer_tokens,
            max_body=_MAX_BODY,
            template_arguments=template.arguments,
            page=False,
        )
        service = Service(settings, partial(load_served, loading, speed, chat_template, term))
        run(service, results, len(wanted), term)


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
    import asyncio

    from lade.cli.run import Interrupt
    from lade.server.app import build_app

    start = perf_counter()
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
                bar.update(task, completed=answered)
                term.status.tell(f"{answered} of {total} requests")

    with Interrupt() as interrupt:
        try:
            app = build_app(service)
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("requests · time left"), TimeRemainingColumn())
            bar = Progress(*columns, console=term.err, transient=True, disable=not term.animated)
            task = bar.add_task("requests", total=total, completed=before)
            with _loaded(service), bar:
                results.drop_failures()
                asyncio.run(answer_all())
        except KeyboardInterrupt:  # the second Ctrl-C
            interrupt.requested = True
    if answered < total:
        why = "interrupted" if interrupt.requested else f"the engine failed ({_breakdown(service)})"
        done = f"{answered} of {total} requests are in {str(results.path)!r}"
        term.say(f"{why}: {done}; the same command with --resume continues", "yellow")
        raise typer.Exit(EXIT_INTERRUPTED if interrupt.requested else EXIT_FAILED)
    _conclude(service, results.path, total, failed, perf_counter() - start, term)


def _conclude(service: Service, path: Path, total: int, failed: int, seconds: float, term: Terminal) -> None:
    """Say that all requests were answered; exit if some failed, or the draft memory could not be saved."""
    now = service.snapshot()
    tokens = 0 if now is None else now.new_tokens
    rate = f"{tokens} tokens in {seconds:.1f} s · {tokens / seconds:.1f} tokens/s"
    term.say(f"{rate} · {str(path)!r} has {total} requests", "dim")
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
    import asyncio

    from lade.server.app import post

    ahead = iter(requests)
    posted: dict[asyncio.Task[Reply], Request] = {}
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
