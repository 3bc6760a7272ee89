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


def event(value: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + encoded(value) + b"\n\n"


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
        silence_s: seconds without any after which None is yielded; None: never.

    Yields:
        The number of an answer and its next step, or None in its place when it has ended.

    Raises:
        Exception: what ended an answer.
    """
    come = asyncio.Queue[tuple[int, Step | None] | Exception]()
    pumps = [asyncio.create_task(_pump(number, answer, come)) for number, answer in enumerate(answers)]
    going = len(pumps)
    try:
        while going:
            try:
                async with asyncio.timeout(silence_s if come.empty() else None):
                    found = await come.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(found, Exception):
                raise found
            going -= found[1] is None
            yield found
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(
    number: int, answer: AsyncIterator[Step], come: asyncio.Queue[tuple[int, Step | None] | Exception]
) -> None:
    """Hand on the steps of one answer; a task for each step would cost more than the step's event."""
    try:
        async for step in answer:
            come.put_nowait((number, step))
        come.put_nowait((number, None))
    except Exception as problem:  # noqa: BLE001 - raised again where it is waited for
        come.put_nowait(problem)
