"""Calls of tools while a model writes them, at all three APIs: pieces, whole answers, and answers that are cut off."""

import json
from dataclasses import replace

import anthropic
import openai
import pytest
from scripted import PLAIN, TALKS, frames, scripted
from served import SERVED, running

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = '{"a": [1, 2], "b": "}\\n"}'
SAID = [
    "</think>", "I add.\n", "<tool", '_call>\n{"na', 'me": "add", "argum', 'ents": {"a', '": [1, ', '2], "b": "',
    "}\\n", '"}', "}\n</tool", '_call>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>',
]  # fmt: skip
MESSAGES = [{"role": "user", "content": "hello"}]
CUT = SAID.index("}\\n")
"""Tokens after which the first call has begun and is not whole."""
SO_FAR = '{"a": [1, 2], "b": "'


@pytest.fixture(scope="module")
def calling():
    with running(replace(SERVED, tokenizer=TALKS), max_rows=2) as server:
        yield server


def asked(tokens, lookahead=None):
    extra = {"ignore_eos": True, "lookahead": lookahead}
    return {"model": "toy", "messages": MESSAGES, "tools": [TOOL], "temperature": 0, "max_tokens": tokens, **extra}


@pytest.mark.parametrize("lookahead", [None, "auto"])
def test_arguments_of_a_chat_are_streamed_in_pieces(calling, monkeypatch, lookahead):
    scripted(monkeypatch, SAID)
    events = calling.events("/v1/chat/completions", **asked(len(SAID), lookahead))
    deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
    pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
    first = [call for call in pieces if call["index"] == 0]
    assert first[0].keys() == {"index", "id", "type", "function"} and first[0]["function"]["name"] == "add"
    assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in first[1:])
    assert "".join(call["function"]["arguments"] for call in first) == ARGUMENTS
    assert len(first) == 5 or lookahead, "a step of several tokens may tell several pieces at once"
    whole = calling.http.post("/v1/chat/completions", json=asked(len(SAID), lookahead)).json()["choices"][0]
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in whole["message"]["tool_calls"]]
    assert told == [("add", ARGUMENTS), ("add", "{}")] and whole["finish_reason"] == "length"
    assert whole["message"]["content"] == "".join(delta.get("content", "") for delta in deltas)


def test_a_cut_off_call_of_a_chat_is_partial(calling, monkeypatch):
    scripted(monkeypatch, SAID)
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
        given = {"model": "toy", "messages": MESSAGES, "tools": [TOOL], **PLAIN}
        for tokens in range(2, CUT + 1):
            whole = client.chat.completions.create(**given, max_tokens=tokens).choices[0]
            with client.chat.completions.stream(**given, max_tokens=tokens) as stream:
                for _ in stream:
                    streamed = stream.current_completion_snapshot.choices[0]
            for choice in (whole, streamed):
                said = "".join(SAID[:tokens])
                begun = [("add", said.partition('"arguments": ')[2])] if '"add"' in said else []
                assert choice.finish_reason == "length" and (choice.message.content or "").strip() == "I add."
                calls = choice.message.tool_calls or ()
                assert [(call.function.name, call.function.arguments) for call in calls] == begun
    assert begun == [("add", SO_FAR)]


def test_inputs_of_messages_are_streamed_in_pieces(calling, monkeypatch):
    scripted(monkeypatch, SAID)
    tool = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
    body = {"model": "toy", "messages": MESSAGES, "tools": [tool]}
    events = frames(calling, "/v1/messages", **body, **PLAIN["extra_body"], max_tokens=len(SAID))
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert [(block["type"], block.get("input")) for block in starts[1:]] == [("tool_use", {})] * 2
    (index,) = [data["index"] for name, data in events if data.get("content_block") == starts[1]]
    mine = [data["delta"] for name, data in events if name == "content_block_delta" and data["index"] == index]
    assert {delta["type"] for delta in mine} == {"input_json_delta"} and len(mine) == 5
    assert "".join(delta["partial_json"] for delta in mine) == ARGUMENTS
    client = anthropic.Anthropic(base_url=calling.url, api_key="none", max_retries=0)
    with client:
        for tokens, inputs in ((len(SAID), [json.loads(ARGUMENTS), {}]), (CUT, [{"a": [1, 2]}]), (CUT - 2, [{}])):
            whole = client.messages.create(**body, max_tokens=tokens, **PLAIN)
            with client.messages.stream(**body, max_tokens=tokens, **PLAIN) as stream:
                final = stream.get_final_message()
            for message in (whole, final):
                assert [block.input for block in message.content[1:]] == inputs
                assert message.stop_reason == "max_tokens" and message.content[0].text.strip() == "I add."


def test_arguments_of_responses_are_streamed_in_pieces(calling, monkeypatch):
    scripted(monkeypatch, SAID)
    tool = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}
    given = {"model": "toy", "input": "hello", "tools": [tool], **PLAIN}
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
        with client.responses.stream(**given, max_output_tokens=len(SAID)) as stream:
            events = list(stream)
        deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
        mine = [event.delta for event in deltas if event.item_id == deltas[0].item_id]
        done = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert "".join(mine) == ARGUMENTS == done[0].arguments and len(mine) == 5
        added = [event.item for event in events if event.type == "response.output_item.added"]
        assert [(item.name, item.arguments) for item in added if item.type == "function_call"] == [("add", "")] * 2
        cut = client.responses.create(**given, max_output_tokens=CUT)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    text, call = cut.output
    assert (text.content[0].text.strip(), text.status) == ("I add.", "completed")
    assert (call.name, call.arguments, call.status) == ("add", SO_FAR, "incomplete")
