"""Whole turns of coding agents, whose requests have much that a server here need not know: call, result, answer.

The first answer of each is scripted. The second one is the model's own, and has to be that of plain decoding on the
conversation as a chat template sees it: what the first one said, and what came of its calls, included.
"""

import json
import time
from dataclasses import replace

import pytest
from scripted import frames, scripted
from served import SERVED, byte_tokenizer, plain, running, text_of

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}|{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{# <think> <tool_call> #}"
)
TOKENIZER = byte_tokenizer(TEMPLATE)
SAID = [
    "<think>", "which ones", "?</think>", "I look.", '<tool_call>{"name": "shell", "argu',
    'ments": {"command": ["ls"]}}</tool_call>', '<tool_call>{"name": "read", "arguments": {"path": "a"}}</tool_call>',
]  # fmt: skip
COMMAND = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "what to run"},
        "timeout_ms": {"type": "number", "minimum": 0},
        "sandbox": {"type": "string", "enum": ["none", "read-only"], "default": "none"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TODO = {
    "type": "object",
    "properties": {"steps": {"type": "array", "items": {"type": "object", "properties": {"step": {"type": "string"}}}}},
}


THEN_ENDS = {"min_tokens": len(SAID), "logit_bias": {"0": 100}, "max_tokens": 20, "lookahead": None}
"""Behind a token for each of the texts above the end is what the model says."""


@pytest.fixture(scope="module")
def agents():
    with running(replace(SERVED, tokenizer=TOKENIZER), max_rows=2) as server:
        yield server


def said_plainly(prompt, tokens):
    """The text behind a prompt, and how long that is."""
    ids = TOKENIZER(prompt)["input_ids"]
    return text_of(plain(ids, max_new_tokens=tokens)), len(ids)


def as_response(role, *texts, kind="input_text"):
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


RESPONSES = {
    "model": "toy",
    "instructions": "Be a coder.",
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs it.", "strict": False, "parameters": COMMAND},
        {"type": "function", "name": "read", "description": "Reads it.", "strict": False, "parameters": PATH},
        {"type": "function", "name": "plan", "description": "Notes it.", "strict": False, "parameters": TODO},
        {"type": "custom", "name": "patch", "description": "Edits.", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "client_metadata": {"installation": "x"},
    "text": {"verbosity": "medium"},
    "temperature": 0,
}
ASKED = [
    as_response("developer", "<permissions>all</permissions>"),
    as_response("user", "<cwd>/a</cwd>", "<shell>sh</shell>"),
    as_response("user", "Which files?"),
]


def test_a_turn_by_responses(agents, monkeypatch):
    headers = {"openai-beta": "responses=experimental", "originator": "an_agent", "session_id": "x", "version": "1"}
    agents.http.headers.update(headers)
    with monkeypatch.context() as patch:
        scripted(patch, SAID)
        events = frames(agents, "/v1/responses", **RESPONSES, input=ASKED, **THEN_ENDS)
    assert events[-1][0] == "response.completed"
    stages = [data["response"] for _, data in events if "response" in data]
    assert len({stage["created_at"] for stage in stages}) == 1 and abs(stages[0]["created_at"] - time.time()) < 60
    done = [data for name, data in events if name == "response.function_call_arguments.done"]
    assert [data["name"] for data in done] == ["shell", "read"]
    items = [data["item"] for name, data in events if name == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert events[-1][1]["response"]["output"] == items and events[-1][1]["response"]["store"] is False
    calls = items[2:]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("shell", {"command": ["ls"]}),
        ("read", {"path": "a"}),
    ]
    results = [
        {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": '{"output": "a b"}'},
        {"type": "function_call_output", "call_id": calls[1]["call_id"], "output": "text of a"},
    ]
    # what is sent back is what came, without ids, as stateless clients do
    history = [{name: value for name, value in item.items() if name != "id"} for item in items]
    body = {**RESPONSES, "input": [*ASKED, *history, *results], "max_output_tokens": 20}
    text, length = said_plainly(
        "[shell][read][plan]<system>Be a coder.|<system><permissions>all</permissions>|"
        "<user><cwd>/a</cwd><shell>sh</shell>|<user>Which files?|"
        '<assistant>(which ones?)I look.!shell{"command": ["ls"]}!read{"path": "a"}|'
        '<tool>{"output": "a b"}|<tool>text of a|<assistant>',
        20,
    )
    last = frames(agents, "/v1/responses", **body)[-1][1]["response"]
    assert last["output"][-1]["content"][0]["text"] == text
    assert last["usage"]["input_tokens_details"]["cached_tokens"] > 30, "the first turn is not read again"
    assert last["usage"]["input_tokens"] == length and last["usage"]["output_tokens"] == 20
    whole = agents.http.post("/v1/responses", json=body)
    ignored = "client_metadata include prompt_cache_key reasoning.effort reasoning.summary"
    assert whole.headers["x-lade-ignored"].split(", ") == [*ignored.split(), "tools.custom", "tools.web_search"]
    assert whole.json()["output"][-1]["content"] == last["output"][-1]["content"]


EPHEMERAL = {"type": "ephemeral"}
MESSAGES = {
    "model": "toy",
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f3a;"},
        {"type": "text", "text": "Be a coder.", "cache_control": EPHEMERAL},
        {"type": "text", "text": "Be brief.", "cache_control": {**EPHEMERAL, "ttl": "1h"}},
    ],
    "tools": [
        {"name": "shell", "description": "Runs it.", "input_schema": {"$schema": "http://x/draft-07#", **COMMAND}},
        {"name": "read", "description": "Reads it.", "input_schema": PATH},
        {"name": "plan", "description": "Notes it.", "input_schema": TODO, "cache_control": EPHEMERAL},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_0_account__session_1"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "temperature": 0,
}
USER = {
    "role": "user",
    "content": [
        {"type": "text", "text": "<reminder>x</reminder>"},
        {"type": "text", "text": "Which files?", "cache_control": EPHEMERAL},
    ],
}


def test_a_turn_by_messages(agents, monkeypatch):
    beta = "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14"
    agents.http.headers.update({"anthropic-version": "2023-06-01", "anthropic-beta": beta, "x-app": "cli"})
    path = "/v1/messages?beta=true"
    with monkeypatch.context() as patch:
        scripted(patch, SAID)
        events = frames(agents, path, **MESSAGES, messages=[USER], **THEN_ENDS)
    members = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert events[0][1]["message"].keys() == members
    assert events[-2][1]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    blocks = blocks_of(events)
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[0].keys() == {"type", "thinking", "signature"}
    calls = blocks[2:]
    assert [(call["name"], call["input"]) for call in calls] == [
        ("shell", {"command": ["ls"]}),
        ("read", {"path": "a"}),
    ]
    blocks[-1]["cache_control"] = EPHEMERAL
    listed = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": listed, "is_error": False},
        {"type": "tool_result", "tool_use_id": calls[1]["id"], "content": "no a", "is_error": True},
        {"type": "text", "text": "<reminder>y</reminder>", "cache_control": EPHEMERAL},
    ]
    talk = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    body = {**MESSAGES, "messages": talk}
    text, length = said_plainly(
        "[shell][read][plan]<system>Be a coder.\n\nBe brief.|<user><reminder>x</reminder>Which files?|"
        '<assistant>(which ones?)I look.!shell{"command": ["ls"]}!read{"path": "a"}|'
        "<tool>a b|<tool>no a|<user><reminder>y</reminder>|<assistant>",
        20,
    )
    events = frames(agents, path, **body, max_tokens=20)
    (block,) = blocks_of(events)
    used = events[0][1]["message"]["usage"]
    assert block == {"type": "text", "text": text} and events[-2][1]["usage"]["output_tokens"] == 20
    assert used["input_tokens"] + used["cache_read_input_tokens"] == length
    assert used["cache_read_input_tokens"] > 30, "the first turn is not read again"
    counted = agents.http.post("/v1/messages/count_tokens?beta=true", json=body)
    assert counted.json() == {"input_tokens": length}
    whole = agents.http.post(path, json={**body, "max_tokens": 20})
    assert whole.json()["content"] == [block]
    ignored = "context_management metadata output_config.effort thinking thinking.budget_tokens"
    assert whole.headers["x-lade-ignored"].split(", ") == [*ignored.split(), "tools.web_search_20250305"]


def blocks_of(events):
    """The blocks that a stream tells piece by piece, as its client has them in the end."""
    blocks, inputs = [], {}
    for name, data in events:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(dict(data["content_block"]))
        elif name == "content_block_delta":
            delta = data["delta"]
            if delta["type"] == "input_json_delta":
                inputs[data["index"]] = inputs.get(data["index"], "") + delta["partial_json"]
            else:
                field = delta["type"].removesuffix("_delta")
                blocks[data["index"]][field] += delta[field]
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return blocks
