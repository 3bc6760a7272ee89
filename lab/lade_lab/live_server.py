"""`lade serve` as a process of its own, a client for it, and its answers in one form for all APIs, streamed or not."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
JSON = {"content-type": "application/json"}
LIMIT_S = 600.0


class NoServerError(RuntimeError):
    """The server did not become ready, or did not end well."""


@dataclass(frozen=True)
class LiveServer:
    """A server that answers."""

    url: str
    pid: int
    model: str


def _popen(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a session of its own, since Ctrl-C is for the client, which ends the server when it is done with it."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)


@contextmanager
def live_server(options: Sequence[str], log: Path) -> Iterator[LiveServer]:
    """Run `lade serve` on a free port until the context ends; standard error is appended to the log.

    Raises:
        NoServerError: it ends before it is ready, or with another exit code than 0.
    """
    command = [sys.executable, "-m", "lade", "serve", "--port", "0", "--json", *options]
    with log.open("ab") as file, _popen(command, file) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise NoServerError(f"lade serve ended with {process.wait()} before it was ready: see {log}")
        told = json.loads(line)
        try:
            yield LiveServer(told["url"], told["pid"], told["model"])
        finally:
            ended = process.poll()
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        if code or ended is not None:
            raise NoServerError(f"lade serve ended with {code}: see {log}")


class Reply(NamedTuple):
    """What came back: names of headers in small letters, and the seconds from the request to the end of the body."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    seconds: float

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Client:
    """One connection, kept between requests and opened again when it has rested for long."""

    _REST_S = 2.0

    def __init__(self, url: str, timeout_s: float = LIMIT_S) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        self.connection = http.client.HTTPConnection(host, int(port), timeout=timeout_s)
        self._last = 0.0

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self.connection.close()

    def get(self, path: str) -> Reply:
        """Return the answer to a GET."""
        return self._sent("GET", path, None, {})

    def post(self, path: str, body: Mapping[str, Any] | bytes, headers: Mapping[str, str] = JSON) -> Reply:
        """Return the answer to a POST, a stream as its bytes."""
        return self._sent("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)

    def _sent(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Reply:
        start = time.perf_counter()
        if start - self._last > self._REST_S:
            self.close()
        try:
            self.connection.request(method, path, body, dict(headers))
            response = self.connection.getresponse()
            read = response.read()
        except BaseException:
            self.close()
            raise
        self._last = time.perf_counter()
        named = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, read, named, self._last - start)


class BrokenAnswerError(ValueError):
    """An answer is not whole, or has not the form of its API."""


Part = tuple[str, str]
"""Kind (text, reasoning, call) and text of a part of an answer, a call as `name arguments`."""


class Answer(NamedTuple):
    """An answer in one form for all APIs.

    Attributes:
        choices: parts of each choice, in their order.
        ends: reason of the end of each choice, as the API has it.
    """

    choices: list[list[Part]]
    ends: list[str]

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return "".join(text for kind, text in self.choices[0] if kind == "text")

    def of_kind(self, kind: str) -> list[str]:
        """Texts of the first choice's parts of a kind."""
        return [text for name, text in self.choices[0] if name == kind]


def answer_of(path: str, reply: Reply) -> Answer:
    """Return the answer of a reply with status 200, streamed or whole.

    Raises:
        BrokenAnswerError: there is none, or its stream has no end.
    """
    if reply.status != 200:
        raise BrokenAnswerError(f"status {reply.status}: {reply.body[:300]!r}")
    try:
        if "event-stream" not in reply.headers.get("content-type", ""):
            return _WHOLE[path](reply.json)
        return _STREAMED[path](events_of(reply.body))
    except (LookupError, TypeError, json.JSONDecodeError, StopIteration) as problem:
        raise BrokenAnswerError(f"{type(problem).__name__} {problem}: {reply.body[-300:]!r}") from None


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream; `[DONE]` becomes `{"type": "[DONE]"}`.

    Raises:
        BrokenAnswerError: one of them is an error.
    """
    lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]
    events = [{"type": line} if line == "[DONE]" else json.loads(line) for line in lines]
    failed = [event for event in events if event.get("error")]
    if failed:
        raise BrokenAnswerError(f"error in the stream: {failed[0]}")
    return events


def _parts(*parts: Part) -> list[Part]:
    return [part for part in parts if part[1]]


def _call(name: str, arguments: Any) -> Part:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return "call", f"{name} {text}"


def _chat(body: dict[str, Any]) -> Answer:
    choices, ends = [], []
    for choice in body["choices"]:
        said = choice["message"]
        calls = [_call(each["function"]["name"], each["function"]["arguments"]) for each in said.get("tool_calls", ())]
        thoughts, text = said.get("reasoning_content") or "", said.get("content") or ""
        choices.append(_parts(("reasoning", thoughts), ("text", text), *calls))
        ends.append(choice["finish_reason"])
    return Answer(choices, ends)


def _completions(body: dict[str, Any]) -> Answer:
    ends = [each["finish_reason"] for each in body["choices"]]
    return Answer([_parts(("text", each["text"])) for each in body["choices"]], ends)


def _responses(body: dict[str, Any]) -> Answer:
    found = list[Part]()
    for item in body["output"]:
        if item["type"] == "function_call":
            found.append(_call(item["name"], item["arguments"]))
        else:
            kind = "reasoning" if item["type"] == "reasoning" else "text"
            found.append((kind, "".join(part["text"] for part in item.get("content") or item.get("summary") or ())))
    return Answer([_parts(*found)], [body["status"]])


def _messages(body: dict[str, Any]) -> Answer:
    """A call at which the answer is cut off has no arguments: the API has its beginning as text in streams alone."""
    found, cut = list[Part](), body["stop_reason"] == "max_tokens"
    for number, block in enumerate(body["content"], 1):
        match block["type"]:
            case "tool_use":
                ends = cut and number == len(body["content"])
                found.append(_call(block["name"], {} if ends else block["input"]))
            case "thinking":
                found.append(("reasoning", block["thinking"]))
            case _:
                found.append(("text", block["text"]))
    return Answer([_parts(*found)], [body["stop_reason"]])


def _streamed_choices(events: list[dict[str, Any]]) -> Answer:
    """Join a stream of chat or text completions to the body of a whole answer."""
    if not events or events[-1].get("type") != "[DONE]":
        raise BrokenAnswerError("the stream has no [DONE]")
    joined = dict[int, dict[str, Any]]()
    for choice in (choice for event in events[:-1] for choice in event["choices"]):
        empty = {"text": "", "reasoning": "", "calls": dict[int, list[str]](), "end": None}
        into, delta = joined.setdefault(choice["index"], empty), choice.get("delta", {})
        into["text"] += choice.get("text") or delta.get("content") or ""
        into["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", ()):
            names = into["calls"].setdefault(call["index"], ["", ""])
            names[0] += call["function"].get("name", "")
            names[1] += call["function"].get("arguments", "")
        into["end"] = choice["finish_reason"] or into["end"]
    ordered = [joined[index] for index in sorted(joined)]
    if any(each["end"] is None for each in ordered):
        raise BrokenAnswerError("a choice of the stream has no finish_reason")
    choices = [
        _parts(("reasoning", each["reasoning"]), ("text", each["text"]), *(_call(*c) for c in each["calls"].values()))
        for each in ordered
    ]
    return Answer(choices, [each["end"] for each in ordered])


def _streamed_response(events: list[dict[str, Any]]) -> Answer:
    if not events or events[-1]["type"] not in ("response.completed", "response.incomplete"):
        raise BrokenAnswerError("the stream does not end with the response")
    whole = _responses(events[-1]["response"])
    if whole.text != "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta"):
        raise BrokenAnswerError("the deltas are not the text of the response")
    return whole


def _streamed_message(events: list[dict[str, Any]]) -> Answer:
    if not events or events[-1]["type"] != "message_stop":
        raise BrokenAnswerError("the stream has no message_stop")
    blocks = dict[int, dict[str, Any]]()
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = {**event["content_block"], "json": ""}
        elif event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            member = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
            block[member] += delta["partial_json" if member == "json" else member]
    end = next(event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta")
    for block in blocks.values():
        if block["json"] and not (end == "max_tokens" and block is blocks[max(blocks)]):
            block["input"] = json.loads(block["json"])
    return _messages({"content": [blocks[index] for index in sorted(blocks)], "stop_reason": end})


_WHOLE = {CHAT: _chat, COMPLETIONS: _completions, RESPONSES: _responses, MESSAGES: _messages}
_STREAMED = {
    CHAT: _streamed_choices,
    COMPLETIONS: _streamed_choices,
    RESPONSES: _streamed_response,
    MESSAGES: _streamed_message,
}
