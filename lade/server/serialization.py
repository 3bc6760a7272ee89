"""JSON and server-sent events.

The packet sizes of an encrypted stream show how much text came per step, and with lookahead decoding how predictable it
was (Wei et al. 2024, https://arxiv.org/abs/2411.01076). Padding hides that.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from lade.server.settings import MAX_OBJECTS, MAX_VALUES
from lade.stats import Step

_PIECE, _LARGE_BODY = 2**18, 2**16


class TooManyValuesError(ValueError):
    """JSON with so many values that parsing would take much time and memory."""


def encoded(value: Any) -> bytes:
    """Encode as UTF-8 JSON without spaces; lone surrogates become question marks."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _plain(value: Any) -> str:
    """Convert subclasses of `str`, such as torch's version."""
    if isinstance(value, str):
        return str(value)
    raise TypeError(f"a {type(value).__name__} is no JSON")


def decoded(raw: bytes | str) -> Any:
    """Parse JSON.

    Raises:
        TooManyValuesError: more than `MAX_OBJECTS` lists and objects, or more than `MAX_VALUES` values.
        ValueError: invalid JSON.
        RecursionError: too deeply nested.
    """
    text = raw if isinstance(raw, bytes) else raw.encode(errors="replace")
    if text.count(b"[") + text.count(b"{") > MAX_OBJECTS or text.count(b",") >= MAX_VALUES:
        _check_counts(text)
    if len(text) > _LARGE_BODY:  # json accepts lone surrogates and NaN, which validation reports by field
        return msgspec.json.decode(raw)  # but holds the interpreter lock for three times as long
    return json.loads(raw)


def _check_counts(text: bytes) -> None:
    """Count values outside of strings: quoted code is one string, whatever its brackets."""
    bare = text.replace(rb"\\", b"").replace(rb"\"", b"")
    objects = commas = within = 0  # `within` is 1 in a string
    for start in range(0, len(bare), _PIECE):  # in pieces, so that other threads run in between
        parts = bare[start : start + _PIECE].split(b'"')
        outside = b"".join(parts[within::2])
        objects += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        within = (within + len(parts) - 1) % 2
        if objects > MAX_OBJECTS:
            raise TooManyValuesError(f"there are more than {MAX_OBJECTS} lists and objects: send fewer")
        if commas >= MAX_VALUES:
            raise TooManyValuesError(f"there are more than {MAX_VALUES} values: send fewer")


class Json(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return encoded(content)


BUCKET = 256  # size in bytes that padded events are a multiple of


def padded(value: dict[str, Any]) -> dict[str, Any]:
    """Add OpenAI's padding member, so that the event's JSON is a multiple of `BUCKET` bytes."""
    missing = -len(encoded({**value, "obfuscation": ""})) % BUCKET
    return {**value, "obfuscation": secrets.token_hex(missing)[:missing]}


DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""They keep proxies from buffering."""


def event(value: dict[str, Any], name: str | None = None) -> bytes:
    """Encode one server-sent event, with a name for APIs that have names."""
    named = b"" if name is None else f"event: {name}\n".encode()
    return named + b"data: " + encoded(value) + b"\n\n"


async def interleaved(
    answers: Sequence[AsyncIterator[Step]], silence_s: float | None
) -> AsyncGenerator[tuple[int, Step | None] | None]:
    """Yield the steps of several answers as they arrive, and None after `silence_s` seconds of silence.

    Yields:
        The index of an answer and its next step, or None in place of the step at its end.

    Raises:
        Exception: the exception that ended an answer.
    """
    queue = asyncio.Queue[tuple[int, Step | None] | Exception | None]()
    tasks = [asyncio.create_task(_pump(number, answer, queue)) for number, answer in enumerate(answers)]
    open_streams, silent = len(tasks), False
    if silence_s is not None:
        tasks.append(asyncio.create_task(_tick(silence_s / 2, queue)))
    try:
        while open_streams:
            found = await queue.get()
            if found is None:
                if silent:
                    yield None
                silent = True
                continue
            if isinstance(found, Exception):
                raise found
            silent = False
            open_streams -= found[1] is None
            yield found
    finally:
        for task in tasks:
            task.cancel()


async def _tick(interval_s: float, queue: asyncio.Queue[Any]) -> None:
    """Put None into the queue periodically; a timer per wait would cost as much as writing an event."""
    while True:
        await asyncio.sleep(interval_s)
        queue.put_nowait(None)


async def _pump(number: int, answer: AsyncIterator[Step], queue: asyncio.Queue[Any]) -> None:
    """Forward the steps of one answer; a task per step would cost more than its event."""
    try:
        async for step in answer:
            queue.put_nowait((number, step))
        queue.put_nowait((number, None))
    except Exception as problem:  # noqa: BLE001 - raised again where it is waited for
        queue.put_nowait(problem)
