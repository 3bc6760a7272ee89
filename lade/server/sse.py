"""Server-sent events, and several answers as one stream of steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from starlette.responses import StreamingResponse

from lade.server.replies import encoded
from lade.stats import Step

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    """One event, with a name where the API has names."""
    named = b"" if name is None else f"event: {name}\n".encode()
    return named + b"data: " + encoded(value) + b"\n\n"


class EventStream(StreamingResponse):
    """A stream of events, which proxies are asked not to hold back.

    Args:
        events: encoded ones.
        headers: others than those of every stream.
    """

    def __init__(self, events: AsyncIterator[bytes], headers: dict[str, str] | None = None) -> None:
        super().__init__(events, media_type="text/event-stream", headers={**_HEADERS, **(headers or {})})


async def interleaved(
    answers: Sequence[AsyncIterator[Step]], silence_s: float | None
) -> AsyncGenerator[tuple[int, Step | None] | None]:
    """The steps of several answers, each as soon as it is there.

    Args:
        answers: the steps of each.
        silence_s: after so many seconds without any, at the latest, None is yielded; None: never.

    Yields:
        The number of an answer and its next step, or None in its place when it has ended.

    Raises:
        Exception: what ended an answer.
    """
    come = asyncio.Queue[tuple[int, Step | None] | Exception | None]()
    tasks = [asyncio.create_task(_pump(number, answer, come)) for number, answer in enumerate(answers)]
    going, silent = len(tasks), False
    if silence_s is not None:
        tasks.append(asyncio.create_task(_beat(silence_s / 2, come)))
    try:
        while going:
            found = await come.get()
            if found is None:
                if silent:
                    yield None
                silent = True
                continue
            if isinstance(found, Exception):
                raise found
            silent = False
            going -= found[1] is None
            yield found
    finally:
        for task in tasks:
            task.cancel()


async def _beat(interval_s: float, come: asyncio.Queue[Any]) -> None:
    """Put None into the queue now and then; a timer for each wait would cost as much as writing a step's event."""
    while True:
        await asyncio.sleep(interval_s)
        come.put_nowait(None)


async def _pump(number: int, answer: AsyncIterator[Step], come: asyncio.Queue[Any]) -> None:
    """Hand on the steps of one answer; a task for each step would cost more than the step's event."""
    try:
        async for step in answer:
            come.put_nowait((number, step))
        come.put_nowait((number, None))
    except Exception as problem:  # noqa: BLE001 - raised again where it is waited for
        come.put_nowait(problem)
