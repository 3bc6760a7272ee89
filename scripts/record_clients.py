"""Record the bodies that clients send today: `python scripts/record_clients.py FOLDER`, with the clients installed.

Each call is sent to a server that keeps the request and refuses it. The clients are best installed into a folder of
their own, which PYTHONPATH names: openai, anthropic, litellm, langchain-openai and langchain-anthropic.
`tests/server/test_recorded_clients.py` sends them to a server of this project.
"""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

import anthropic
import litellm
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

KEPT = ("anthropic-beta", "anthropic-version", "content-type")
SYSTEM, QUESTION, LIMIT = "Be brief.", "What is the weather in Oslo?", 40
CALL, RESULT = {"city": "Oslo"}, '{"celsius": 7}'
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "name of a city"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}}
RESPONSES_TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": PARAMETERS}
ANTHROPIC_TOOL = {"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}
TALK = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
CALLED = [
    *TALK,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(CALL)}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": RESULT},
]
SAID = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
_CALLS = [{"name": "weather", "args": CALL, "id": "c1"}]
TURNS = [*SAID, AIMessage("", tool_calls=_CALLS), ToolMessage(RESULT, tool_call_id="c1")]


class Weather(BaseModel):
    """An answer with a schema."""

    city: str
    celsius: int


class Recorder(HTTPServer):
    """Keeps the last request, and refuses it."""

    last: dict[str, Any]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    """Hands the request to its server."""

    def do_POST(self) -> None:
        """Keep the body, and refuse it."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name: self.headers[name] for name in KEPT if name in self.headers}
        self.server.last = {"path": self.path, "headers": headers, "body": body}  # type: ignore[attr-defined]
        self.send_response(400)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keep silent."""


def read(stream: Any) -> None:
    for _ in stream:
        pass


def by_openai(url: str) -> dict[str, Callable[[], Any]]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat, responses = client.chat.completions, client.responses
    said: dict[str, Any] = {"model": "toy", "messages": TALK, "temperature": 0, "max_completion_tokens": LIMIT}
    given: dict[str, Any] = {"model": "toy", "instructions": SYSTEM, "input": QUESTION, "temperature": 0}
    given["max_output_tokens"] = LIMIT
    item = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": json.dumps(CALL)}
    turns = [{"role": "user", "content": QUESTION}, item]
    turns.append({"type": "function_call_output", "call_id": "c1", "output": RESULT})

    def streamed(manager: Any) -> None:
        with manager as stream:
            read(stream)

    return {
        "chat": lambda: chat.create(**said),
        "chat-stream": lambda: read(chat.create(**said, stream=True, stream_options={"include_usage": True})),
        "chat-tools": lambda: chat.create(**said, tools=[CHAT_TOOL], tool_choice="auto", parallel_tool_calls=True),
        "chat-tools-stream": lambda: streamed(chat.stream(**said, tools=[{**CHAT_TOOL}])),
        "chat-tool-result": lambda: chat.create(**{**said, "messages": CALLED}, tools=[CHAT_TOOL]),
        "chat-schema": lambda: chat.parse(**said, response_format=Weather),
        "responses": lambda: responses.create(**given),
        "responses-stream": lambda: read(responses.create(**given, stream=True)),
        "responses-tools": lambda: responses.create(**given, tools=[RESPONSES_TOOL]),
        "responses-tools-stream": lambda: streamed(responses.stream(**given, tools=[RESPONSES_TOOL])),
        "responses-tool-result": lambda: responses.create(**{**given, "input": turns}, tools=[RESPONSES_TOOL]),
        "responses-schema": lambda: responses.parse(**given, text_format=Weather),
    }


def by_anthropic(url: str) -> dict[str, Callable[[], Any]]:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    user = {"role": "user", "content": QUESTION}
    said: dict[str, Any] = {"model": "toy", "system": SYSTEM, "messages": [user], "max_tokens": LIMIT}
    cached = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    use = {"type": "tool_use", "id": "c1", "name": "weather", "input": CALL}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": RESULT}]}
    turns = [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]

    def streamed(**more: Any) -> None:
        with client.messages.stream(**said, **more) as stream:
            read(stream)

    return {
        "messages": lambda: client.messages.create(**{**said, "system": cached}),
        "messages-stream": streamed,
        "messages-tools": lambda: client.messages.create(
            **said, tools=[ANTHROPIC_TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}
        ),
        "messages-tools-stream": lambda: streamed(tools=[ANTHROPIC_TOOL]),
        "messages-tool-result": lambda: client.messages.create(**{**said, "messages": turns}, tools=[ANTHROPIC_TOOL]),
        "messages-schema": lambda: client.messages.parse(**said, output_format=Weather),
    }


def by_litellm(url: str) -> dict[str, Callable[[], Any]]:
    as_openai = {"model": "openai/toy", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": LIMIT}
    as_anthropic = {**as_openai, "model": "anthropic/toy", "api_base": url}
    said: dict[str, Any] = {"messages": TALK, "temperature": 0, "max_retries": 0, "num_retries": 0}
    return {
        "chat": lambda: litellm.completion(**as_openai, **said),
        "chat-tools-stream": lambda: read(litellm.completion(**as_openai, **said, tools=[CHAT_TOOL], stream=True)),
        "chat-schema": lambda: litellm.completion(**as_openai, **said, response_format=Weather),
        "messages-tools": lambda: litellm.completion(**as_anthropic, **said, tools=[CHAT_TOOL]),
        "responses-tools": lambda: litellm.responses(
            model="openai/toy", api_base=f"{url}/v1", api_key="none", input=QUESTION, tools=[RESPONSES_TOOL]
        ),
    }


def by_langchain(url: str) -> dict[str, Callable[[], Any]]:
    options: dict[str, Any] = {"model": "toy", "api_key": "none", "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**options, base_url=f"{url}/v1", max_tokens=LIMIT, stream_usage=True)
    responses = ChatOpenAI(**options, base_url=f"{url}/v1", max_tokens=LIMIT, use_responses_api=True)
    return {
        "chat": lambda: chat.invoke(SAID),
        "chat-stream": lambda: read(chat.stream(SAID)),
        "chat-tools": lambda: chat.bind_tools([CHAT_TOOL]).invoke(SAID),
        "chat-tool-result": lambda: chat.bind_tools([CHAT_TOOL]).invoke(TURNS),
        "chat-schema": lambda: chat.with_structured_output(Weather).invoke(SAID),
        "responses-tools": lambda: responses.bind_tools([CHAT_TOOL]).invoke(SAID),
        "responses-tool-result": lambda: responses.bind_tools([CHAT_TOOL]).invoke(TURNS),
    }


def by_langchain_anthropic(url: str) -> dict[str, Callable[[], Any]]:
    options: dict[str, Any] = {"model": "toy", "api_key": "none", "temperature": 0, "max_retries": 0}
    messages = ChatAnthropic(**options, base_url=url, max_tokens=LIMIT)
    return {
        "messages-stream": lambda: read(messages.stream(SAID)),
        "messages-tools": lambda: messages.bind_tools([CHAT_TOOL]).invoke(SAID),
        "messages-tool-result": lambda: messages.bind_tools([CHAT_TOOL]).invoke(TURNS),
    }


def main() -> None:
    folder, recorder = Path(sys.argv[1]), Recorder()
    ways = {
        "openai": by_openai,
        "anthropic": by_anthropic,
        "litellm": by_litellm,
        "langchain-openai": by_langchain,
        "langchain-anthropic": by_langchain_anthropic,
    }
    for package, way in ways.items():
        found = []
        for name, call in way(recorder.url).items():
            recorder.last = {}
            with suppress(Exception):  # the refusal
                call()
            assert recorder.last, f"{package} {name} has sent nothing"
            found.append({"name": name, **recorder.last})
        whole = {"client": f"{package} {version(package)}", "origin": "recorded", "requests": found}
        (folder / f"{package}.json").write_text(json.dumps(whole, indent=1) + "\n")
        print(f"{whole['client']}: {len(found)} requests")


if __name__ == "__main__":
    main()
