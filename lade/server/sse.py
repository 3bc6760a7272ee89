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
    awaited = {_following(each): number for number, each in enumerate(answers)}
    try:
        while awaited:
            done, _ = await asyncio.wait(awaited, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                yield None
            for task in sorted(done, key=awaited.__getitem__):
                number, step = awaited.pop(task), task.result()
                if step is not None:
                    awaited[_following(answers[number])] = number
                yield number, step
    finally:
        for task in awaited:
            task.cancel()


def _following(answer: AsyncIterator[Step]) -> asyncio.Task[Step | None]:
    async def step() -> Step | None:
        return await anext(answer, None)

    return asyncio.create_task(step())
