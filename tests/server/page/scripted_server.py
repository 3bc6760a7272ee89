"""A server that speaks as `lade serve` does and answers from a script, for the page."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lade.server.app import mount_page

SOURCES = ("memory", "pool", "window", "prompt", "text")
POEM_WORDS = "Here is how two sorted lists are merged, with one pass over both:"
POEM = """Here is how two sorted lists are *merged*, with **one pass** over both:

```python
def merge(left, right):
    merged = []
    while left and right:
        smaller = left if left[0] <= right[0] else right
        merged.append(smaller.pop(0))
    return merged + left + right
```

1. Compare the first items & take the smaller one.
2. Go on until one list is empty.

| list | items | left over |
|------|-------|-----------|
| left | 3 | 0 |
| right | 4 | 2 |

See [the manual](https://docs.python.org/3/) for `heapq.merge`.
"""
EVIL = """<img src=x onerror=alert(1)> and [a link](javascript:alert(2)) and ![p](https://evil.example/p.png)

<script>alert(3)</script>

<a href="javascript:alert(4)" onclick="alert(5)" style="color:red">raw</a>

```html" onmouseover="alert(6)
<svg onload=alert(7)>
```
"""


@dataclass
class Script:
    """What the server does, set by the tests; and what it was asked.

    A message that is no key of `answers` is answered with `POEM`; an answer of None goes on until the client leaves.
    """

    answers: dict[str, str | None] = field(default_factory=lambda: {"evil": EVIL, "endless": None})
    key: str | None = None  # asked for, if any
    state: str = "ok"  # of `/ready`
    refuse: tuple[int, dict[str, Any]] | None = None  # the status and error that every chat is answered with
    templated: bool = True  # whether the model has a chat template
    told: bool = True  # whether `/v1/models` says so
    defaults: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.7, "max_tokens": 512})
    page: dict[str, Any] = field(default_factory=dict)  # what the page is to say where a request does not
    guessed: tuple[str, ...] = SOURCES  # of tokens that are guessed; none: each pass yields one token
    thinks: str = ""
    breaks: bool = False
    pause_s: float = 0.002  # between two steps
    asked: list[dict[str, Any]] = field(default_factory=list)  # bodies of the requests so far
    sessions: list[str] = field(default_factory=list)
    running: int = 0  # answers that are streaming
    left: int = 0  # clients that left amid an answer


def turn(role: str, content: str, **others: Any) -> dict[str, Any]:
    """A message as the page keeps it; each word of an answer is a token that the model chose itself."""
    words = re.findall(r"\s*\S+", content)
    trace = {"trace": [[1, "b", [len(word)]] for word in words], "finish": "stop"} if role == "assistant" else {}
    return {"role": role, "content": content, **trace, **others}


def steps_of(text: str, guessed: tuple[str, ...], seed: int = 3) -> list[tuple[list[str], list[str]]]:
    """A text as texts and sources of tokens, step by step: one token each where nothing is guessed."""
    tokens = re.findall(r"\s?\w+|[^\w]", text) or [""]  # an answer that ends at once
    chance, steps = random.Random(seed), [([tokens[0]], ["prefill"])]
    rest = tokens[1:]
    while rest:
        size = chance.choice([1, 1, 2, 3, 4, 6]) if guessed else 1
        source = chance.choice(guessed or ("bonus",))
        taken, rest = rest[:size], rest[size:]
        steps.append((taken, [source] * (len(taken) - 1) + ["bonus"]))
    return steps


class ScriptedServer:
    """The routes that the page uses."""

    def __init__(self, script: Script) -> None:
        self.script = script
        routes = [
            Route("/ready", self.ready),
            Route("/v1/models", self.models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.text, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)
        mount_page(self.app)

    def refusal(self, request: Request) -> Response | None:
        """Why a request is not answered, if it is not."""
        if self.script.key and request.headers.get("authorization") != f"Bearer {self.script.key}":
            return error(401, "invalid_api_key", "wrong key")
        if self.script.state == "loading":
            return error(503, "model_loading", "the model is being loaded")
        return None

    async def ready(self, _: Request) -> Response:
        body = {"status": self.script.state}
        return JSONResponse(body, status_code=200 if self.script.state == "ok" else 503)

    async def models(self, request: Request) -> Response:
        script = self.script
        own = {"chat": script.templated, "context": 1024, "images": False, "defaults": script.defaults}
        own["page"] = script.page
        model = {"id": "tiny-story-model", "object": "model", "lade": own if script.told else {}}
        return self.refusal(request) or JSONResponse({"object": "list", "data": [model]})

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        if not self.script.templated:
            return error(400, "no_chat_template", "the model has no chat template")
        said = body["messages"][-1]["content"]
        text = said if isinstance(said, str) else "".join(part.get("text", "") for part in said)
        return self.answer(request, body, text, "content")

    async def text(self, request: Request) -> Response:
        body = await request.json()
        return self.answer(request, body, body["prompt"], "text")

    def answer(self, request: Request, body: dict[str, Any], said: str, member: str) -> Response:
        if (refusal := self.refusal(request)) is not None:
            return refusal
        if self.script.refuse:
            return error(self.script.refuse[0], **self.script.refuse[1])
        self.script.asked.append(body)
        self.script.sessions.append(request.headers["x-session-id"])
        return StreamingResponse(self.stream(said, member), media_type="text/event-stream")

    async def stream(self, said: str, member: str) -> AsyncIterator[str]:
        script = self.script
        script.running += 1
        try:
            async for frame in self.frames(said, member):
                yield frame
                await asyncio.sleep(script.pause_s)
        except asyncio.CancelledError:
            script.left += 1
            raise
        finally:
            script.running -= 1

    async def frames(self, said: str, member: str) -> AsyncIterator[str]:
        answer = self.script.answers.get(said, POEM)
        yield ": ping\n\n"
        yield frame(choice({member: ""} if member == "text" else {"role": "assistant", "content": ""}, member))
        while answer is None:
            yield frame(choice({member: " on"}, member), trace([" on"], ["bonus"]))
        if self.script.thinks and member != "text":
            for texts, sources in steps_of(self.script.thinks, self.script.guessed):
                yield frame(choice({"reasoning_content": "".join(texts)}, member), trace(texts, sources))
        steps = steps_of(answer, self.script.guessed)
        for texts, sources in steps[: len(steps) // 2] if self.script.breaks else steps:
            yield frame(choice({member: "".join(texts)}, member), trace(texts, sources))
        if self.script.breaks:
            yield frame({"error": {"message": "the pass failed", "code": "internal_error"}})
            return
        told = {"seed": 7, "steps": len(steps) - 1, "queue_ms": 1.0, "prefill_ms": 12.0, "decode_ms": 340.0}
        yield frame(choice({}, member, finish="stop"), told)
        yield frame({"choices": [], "usage": {"prompt_tokens": 21, "completion_tokens": 99}})
        yield "data: [DONE]\n\n"


def choice(delta: dict[str, str], member: str, finish: str | None = None) -> dict[str, Any]:
    shown = {"text": delta.get("text", "")} if member == "text" else {"delta": delta}
    return {"choices": [{"index": 0, "finish_reason": finish, **shown}], "usage": None}


def trace(texts: list[str], sources: list[str]) -> dict[str, Any]:
    return {"tokens": list(range(len(texts))), "texts": texts, "sources": sources, "fed": 17}


def frame(event: dict[str, Any], lade: dict[str, Any] | None = None) -> str:
    return f"data: {json.dumps(event | ({'lade': lade} if lade else {}))}\n\n"


def error(status: int, code: str, message: str) -> Response:
    body = {"error": {"message": message, "type": "error", "param": None, "code": code}}
    return JSONResponse(body, status_code=status)


class Running:
    """The server in a thread of its own."""

    def __init__(self, script: Script) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"
        app = ScriptedServer(script).app
        # without a configuration of logs, which would be that of the whole process
        config = uvicorn.Config(app, log_config=None, access_log=False, ws="none", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=10)


if __name__ == "__main__":
    running = Running(Script(pause_s=0.05))
    print(running.url, flush=True)  # noqa: T201
    running.thread.join()
