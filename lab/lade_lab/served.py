"""A server in this process, and a client that counts: for experiments that go through HTTP."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lade.server.listen import Server
from lade.server.served_model import ServedModel
from lade.server.service import Service
from lade.server.settings import Settings, bound, url_of

HEADERS = {"content-type": "application/json"}


@dataclass
class Reply:
    """One answer of `/v1/completions` or `/v1/chat/completions`.

    Attributes:
        error: message of a refusal; "" for an answer.
        text: text of the choice.
        tokens: ids of the choice.
        finish: reason of its end; "" if the stream was left before.
        calls: tool calls, as the API gives them.
        steps: decoding steps after prefill.
        cached: prompt tokens from the prefix cache.
    """

    error: str = ""
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    cached: int = 0


@contextmanager
def server(model: ServedModel, settings: Settings) -> Iterator[str]:
    """Serve a model in a thread of this process, until the context ends; yield the URL.

    Raises:
        RuntimeError: the model cannot be served.
    """
    import asyncio

    service = Service(settings, lambda: model)
    listening, running = bound("127.0.0.1", 0), Server(service)
    thread = threading.Thread(target=lambda: asyncio.run(running.serve([listening])), daemon=True)
    thread.start()
    while service.phase == "loading" and service.problem is None:
        time.sleep(0.05)
    if service.problem is not None:
        raise RuntimeError(str(service.problem))
    try:
        yield url_of("127.0.0.1", listening)
    finally:
        running.handle_exit(15, None)
        thread.join()


def _request(url: str, body: Mapping[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(url, json.dumps(body).encode(), HEADERS)


def ask(url: str, body: Mapping[str, Any]) -> Reply:
    """Post a request for one choice, and return its answer or its refusal."""
    try:
        with urllib.request.urlopen(_request(url, {**body, "return_token_ids": True})) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as problem:
        return Reply(error=json.load(problem)["error"]["message"])
    (choice,), figures = answer["choices"], answer["lade"]
    message = choice.get("message", {})
    text = choice.get("text", message.get("content")) or ""
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    calls = message.get("tool_calls", [])
    return Reply("", text, choice["token_ids"], choice["finish_reason"], calls, figures["steps"], cached)


def ask_streamed(url: str, body: Mapping[str, Any], leave_after: int | None = None) -> Reply:
    """Post a request for a stream of one text completion; return it joined, up to so many events."""
    found, events = Reply(), 0
    asked = {**body, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with urllib.request.urlopen(_request(url, asked)) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                if events == leave_after:
                    return found
                events += 1
                _take(found, json.loads(line[6:]))
    except urllib.error.HTTPError as problem:
        return Reply(error=json.load(problem)["error"]["message"])
    return found


def _take(found: Reply, event: Mapping[str, Any]) -> None:
    if "error" in event:
        found.error = event["error"]["message"]
    for choice in event.get("choices", ()):
        found.text += choice["text"]
        found.tokens += choice.get("token_ids", ())
        found.finish = choice["finish_reason"] or found.finish
    found.steps = event.get("lade", {}).get("steps", found.steps)
    if event.get("usage"):
        found.cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
