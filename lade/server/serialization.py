"""JSON and server-sent events.

Who sees the packets of an encrypted stream sees how much text came at a time, and with lookahead decoding that tells
how well a text was foreseen (Wei et al. 2024, https://arxiv.org/abs/2411.01076).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from lade.server.settings import MOST_OBJECTS, MOST_VALUES
from lade.stats import Step

_PIECE, _LARGE = 2**18, 2**16


class TooManyValuesError(ValueError):
    """JSON that would take long to read, and much memory: it has too many values."""


def encoded(value: Any) -> bytes:
    """UTF-8 without spaces. Half a character, which JSON can spell and UTF-8 cannot, becomes a question mark."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _plain(value: Any) -> str:
    """Of kinds of text that are not quite `str`, such as torch's version."""
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is no JSON")


def decoded(raw: bytes | str) -> Any:
    """What JSON means.

    Raises:
        TooManyValuesError: it has more than `MOST_OBJECTS` lists and objects, or more than `MOST_VALUES` values.
        ValueError: it is none.
        RecursionError: it is too deep.
    """
    text = raw if isinstance(raw, bytes) else raw.encode(errors="replace")
    if text.count(b"[") + text.count(b"{") > MOST_OBJECTS or text.count(b",") >= MOST_VALUES:
        _check_counts(text)
    if len(text) > _LARGE:  # Python's own reader takes halves of characters and NaN, which can be told apart later
        return msgspec.json.decode(raw)  # but of a million numbers it would hold up all threads for thrice as long
    return json.loads(raw)


def _check_counts(text: bytes) -> None:
    """Count what stands outside of strings: code that somebody quotes is one string, however many brackets it has."""
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
    objects = nexts = within = 0  # `within` is 1 in a string
    for start in range(0, len(bare), _PIECE):  # else other threads would wait for all of it
        parts = bare[start : start + _PIECE].split(b'"')
        outside = b"".join(parts[within::2])
        objects += outside.count(b"[") + outside.count(b"{")
        nexts += outside.count(b",")
        within = (within + len(parts) - 1) % 2
        if objects > MOST_OBJECTS:
            raise TooManyValuesError(f"there are more than {MOST_OBJECTS} lists and objects: send fewer")
        if nexts >= MOST_VALUES:
            raise TooManyValuesError(f"there are more than {MOST_VALUES} values: send fewer")


class Json(Response):
    """A whole answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return encoded(content)


BUCKET = 256
"""Bytes: events have a multiple of it."""


def padded(value: dict[str, Any]) -> dict[str, Any]:
    """An event's value with the member that OpenAI pads with, so that its JSON has a multiple of `BUCKET` bytes."""
    missing = -len(encoded({**value, "obfuscation": ""})) % BUCKET
    return {**value, "obfuscation": secrets.token_hex(missing)[:missing]}


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
