"""Requests of all kinds, each the same whenever it is asked for by the same number."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lade_lab.live_server import CHAT, COMPLETIONS, MESSAGES, RESPONSES

TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}: {{ m['content'] }}"
    "{% for call in m['tool_calls'] or () %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% for tool in tools or () %}# {{ tool['function']['name'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}def {% endif %}{# <think> <tool_call> #}"
)
"""Chat template for the embedded model, with marks by which reasoning and calls are parsed."""
WORDS = "read write list index value count open close first last name path node tree total line text key".split()  # noqa: SIM905
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look_up", "description": "Look up a key.", "parameters": SCHEMA}


@dataclass(frozen=True)
class Request:
    """One request, and what is to come of it.

    Attributes:
        kind: name of its kind.
        path, body: of the POST; a body in bytes is sent as it is.
        statuses: that are right.
        answered: whether an answer is to be read, and compared with the first one to the same request.
        headers: beside the usual ones.
        manner: how it is read: whole, slowly, or left after a while.
    """

    kind: str
    path: str
    body: Mapping[str, Any] | bytes
    statuses: tuple[int, ...] = (200,)
    answered: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    manner: str = "whole"


def text(rng: random.Random, words: int) -> str:
    """A prompt of so many words."""
    return " ".join(rng.choices(WORDS, k=words))


def sampling(rng: random.Random) -> dict[str, Any]:
    """Fields of a greedy or a sampled answer, the latter with a seed."""
    if rng.random() < 0.4:
        return {"temperature": 0}
    made = {"temperature": rng.choice([0.5, 0.8, 1.2]), "top_p": rng.choice([0.8, 1.0]), "seed": rng.randrange(2**31)}
    if rng.random() < 0.3:
        made |= {"presence_penalty": 0.5, "top_k": 40}
    return made


def messages(rng: random.Random, words: int | None = None) -> list[dict[str, Any]]:
    """A conversation of one to five messages."""
    count = rng.choice([1, 1, 3, 5]) if words is None else 1
    roles = ["user", "assistant"] * 3
    return [{"role": roles[at], "content": text(rng, words or rng.randint(2, 25))} for at in range(count)]


def most(rng: random.Random) -> int:
    """Tokens of an answer."""
    return rng.choice([4, 12, 24, 48])


def chat(rng: random.Random) -> Request:
    """A conversation, sometimes with log-probabilities, stops or several choices."""
    body = {"messages": messages(rng), "max_tokens": most(rng), **sampling(rng)}
    extra: dict[str, Any] = rng.choice(
        [{}, {}, {"stop": ["\n", "return"]}, {"logprobs": True, "top_logprobs": 3}, {"n": 3}]
    )
    return Request("chat", CHAT, {**body, **extra, "stream": rng.random() < 0.5})


def completion(rng: random.Random) -> Request:
    """A text to continue, or two."""
    prompt: Any = f"def {text(rng, 2).replace(' ', '_')}("
    body = {"prompt": [prompt, prompt + "self"] if rng.random() < 0.2 else prompt, "max_tokens": most(rng)}
    extra: dict[str, Any] = rng.choice(
        [
            {},
            {"stop": "\n\n"},
            {"echo": True, "logprobs": 1},
            {"prediction": {"type": "content", "content": prompt}},
            {"n": 2},
        ]
    )
    if isinstance(body["prompt"], list):
        extra = {}
    return Request("completion", COMPLETIONS, {**body, **sampling(rng), **extra, "stream": rng.random() < 0.5})


def response(rng: random.Random) -> Request:
    """OpenAI's newer API."""
    body = {"input": text(rng, 12), "max_output_tokens": most(rng), **sampling(rng)}
    return Request("response", RESPONSES, {**body, "stream": rng.random() < 0.5})


def message(rng: random.Random) -> Request:
    """Anthropic's API."""
    body = {"messages": messages(rng), "max_tokens": most(rng), "system": "Python", **sampling(rng)}
    return Request("message", MESSAGES, {**body, "stream": rng.random() < 0.5})


def tool(rng: random.Random) -> Request:
    """A call of a tool that has to be made, by one of three APIs."""
    stream = {"stream": rng.random() < 0.5, **sampling(rng)}
    said, limit = messages(rng), 90
    match rng.randrange(3):
        case 0:
            tools = [{"type": "function", "function": FUNCTION}]
            body = {"messages": said, "tools": tools, "tool_choice": "required", "max_tokens": limit}
            return Request("tool", CHAT, {**body, **stream})
        case 1:
            tools = [{"type": "function", **FUNCTION}]
            body = {"input": said[-1]["content"], "tools": tools, "tool_choice": "required", "max_output_tokens": limit}
            return Request("tool", RESPONSES, {**body, **stream})
    tools = [{"name": "look_up", "input_schema": SCHEMA}]
    body = {"messages": said, "tools": tools, "tool_choice": {"type": "any"}, "max_tokens": limit}
    return Request("tool", MESSAGES, {**body, **stream})


def schema(rng: random.Random) -> Request:
    """An answer in JSON; one schema of twenty, so that some are compiled anew and some are not."""
    own = {**SCHEMA, "properties": {**SCHEMA["properties"], f"key_{rng.randrange(20)}": {"type": "boolean"}}}
    form = {"type": "json_schema", "json_schema": {"name": "found", "schema": own}}
    body = {"messages": messages(rng), "response_format": form, "max_tokens": 60, **sampling(rng)}
    return Request("schema", CHAT, {**body, "stream": rng.random() < 0.5})


def long_prompt(rng: random.Random) -> Request:
    """A prompt of up to nine tenths of the context."""
    body = {"messages": messages(rng, rng.randint(100, 450)), "max_tokens": 12, **sampling(rng)}
    return Request("long prompt", CHAT, {**body, "stream": rng.random() < 0.5})


def bad(rng: random.Random) -> Request:
    """A request that is refused."""
    said = messages(rng)
    refused: list[tuple[str, dict[str, Any] | bytes, tuple[int, ...]]] = [
        (CHAT, {"messages": said, "temperature": -1}, (400,)),
        (CHAT, {"messages": said, "n": "two"}, (400,)),
        (CHAT, {"messages": []}, (400,)),
        (CHAT, {"messages": said, "model": "none"}, (404,)),
        (COMPLETIONS, b'{"prompt": "x", ', (400,)),
        (COMPLETIONS, {"prompt": text(rng, 3000)}, (400,)),
        (RESPONSES, {"input": "x", "max_output_tokens": -4}, (400,)),
        (MESSAGES, {"messages": said}, (400,)),
        (
            CHAT,
            {"messages": said, "response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
            (400,),
        ),
        ("/v1/nothing", {"x": 1}, (404,)),
        ("/live", {"x": 1}, (405,)),
    ]
    path, body, statuses = rng.choice(refused)
    return Request("bad", path, body, statuses, answered=False)


def giant(rng: random.Random) -> Request:
    """A body at the limit of 4 MiB, or beyond."""
    if rng.random() < 0.5:
        return Request("giant", CHAT, b" " * (2**22 + 100), (413,), answered=False)
    if rng.random() < 0.5:
        body = json.dumps({"messages": [{}] * 400_000}).encode()
        return Request("giant", CHAT, body, (400,), answered=False)
    return Request("giant", COMPLETIONS, {"prompt": "ab " * 1_300_000, "max_tokens": 2}, (400,), answered=False)


def slow(rng: random.Random) -> Request:
    """A stream that is read slowly."""
    body = {"prompt": "def f(", "max_tokens": 96, "ignore_eos": True, **sampling(rng), "stream": True}
    return Request("slow reader", COMPLETIONS, body, manner="slow")


def left(rng: random.Random) -> Request:
    """A request whose client leaves before its end."""
    body = {"prompt": text(rng, 9), "max_tokens": 400, "ignore_eos": True, **sampling(rng)}
    return Request("left", COMPLETIONS, {**body, "stream": rng.random() < 0.6}, answered=False, manner="left")


def other(rng: random.Random) -> Request:
    """What is no answer: tokens of a text."""
    body: dict[str, Any] = {"prompt": text(rng, 30)}
    if rng.random() < 0.5:
        return Request("other", "/tokenize", body, answered=False)
    return Request("other", f"{MESSAGES}/count_tokens", {"messages": messages(rng)}, answered=False)


def churn(rng: random.Random) -> Request:
    """Connections that come and go, some with a part of a request."""
    return Request("churn", "/live", b"", answered=False, manner="churn")


KINDS: dict[Callable[[random.Random], Request], int] = {
    chat: 6, completion: 5, response: 3, message: 3, tool: 2, schema: 3, long_prompt: 2, bad: 3, giant: 1, slow: 1,
    left: 2, other: 1, churn: 1,
}  # fmt: skip
"""Kinds with how often they come."""
REPEATED = 12
"""Requests of each kind that come again and again; the others come once."""


def pick(rng: random.Random, number: int) -> tuple[str, Request]:
    """Return a request and its name; one half of them are among those that come again."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    own = rng.randrange(REPEATED) if rng.random() < 0.5 else REPEATED + number
    return f"{kind.__name__} {own}", kind(random.Random(f"{kind.__name__} {own}"))
