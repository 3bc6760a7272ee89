"""Bodies as clients send them today: what they get is what they can parse, and what plain decoding says.

`scripts/record_clients.py` makes those files of `recorded` whose origin is "recorded"; others say where they are from.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import anthropic.types
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter
from scripted import AGENTS, scripted
from served import SERVED, byte_tokenizer, plain, running, text_of

FILES = sorted((Path(__file__).parent / "recorded").glob("*.json"))
CASES = [
    pytest.param(each, id=f"{path.stem}: {each['name']}")
    for path in FILES
    for each in json.loads(path.read_text(encoding="utf-8"))["requests"]
]
TOKENIZER = byte_tokenizer(AGENTS.replace("<think> ", ""))  # it calls tools, and does not reason
CALLING = ["I look.", '<tool_call>{"name": "weather", "argu', 'ments": {"city": "Oslo"}}</tool_call>']
SCHEMA = ['{"city": "Oslo"', ', "celsius": 7}']
TOOL = "[weather]"
RENDERED = "<system>Be brief.|<user>What is the weather in Oslo?|"
RESULT = '<assistant>!weather{"city": "Oslo"}|<tool>{"celsius": 7}|'
WHOLE = {
    "/v1/chat/completions": TypeAdapter(openai.types.chat.ChatCompletion),
    "/v1/responses": TypeAdapter(openai.types.responses.Response),
    "/v1/messages": TypeAdapter(anthropic.types.Message),
}
EVENTS = {
    "/v1/chat/completions": TypeAdapter(openai.types.chat.ChatCompletionChunk),
    "/v1/responses": TypeAdapter(openai.types.responses.ResponseStreamEvent),
    "/v1/messages": TypeAdapter(anthropic.types.RawMessageStreamEvent),
}


@pytest.fixture(scope="module")
def clients():
    with running(replace(SERVED, tokenizer=TOKENIZER), max_rows=2) as server:
        yield server


def answer(server, request, **more):
    """What a client makes of an answer: the text, and the calls with their arguments."""
    path, body = request["path"], {**request["body"], **more}
    response = server.http.post(path, json=body, headers=request["headers"])
    assert response.status_code == 200, response.text
    kind = path.partition("?")[0]
    if not body.get("stream"):
        return parts_of_whole(WHOLE[kind].validate_json(response.text, strict=True))
    frames = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    assert (frames[-1] == "[DONE]") == (kind == "/v1/chat/completions")
    return parts_of_events([EVENTS[kind].validate_json(each) for each in frames if each != "[DONE]"])


def parts_of_whole(whole):
    if isinstance(whole, anthropic.types.Message):
        calls = [(block.name, block.input) for block in whole.content if block.type == "tool_use"]
        assert (whole.stop_reason == "tool_use") == bool(calls) and whole.usage.output_tokens
        return "".join(block.text for block in whole.content if block.type == "text"), calls
    if isinstance(whole, openai.types.responses.Response):
        called = [item for item in whole.output if item.type == "function_call"]
        assert all(item.call_id for item in called) and whole.usage.output_tokens
        return whole.output_text, [(item.name, json.loads(item.arguments)) for item in called]
    message = whole.choices[0].message
    called = message.tool_calls or []
    assert (whole.choices[0].finish_reason == "tool_calls") == bool(called) and whole.usage.completion_tokens
    return message.content or "", [(call.function.name, json.loads(call.function.arguments)) for call in called]


def parts_of_events(events):
    text, calls = "", []
    for event in events:
        if isinstance(event, openai.types.chat.ChatCompletionChunk):
            for choice in event.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    calls += [["", ""]] * (call.index + 1 - len(calls))
                    name, arguments = calls[call.index]
                    calls[call.index] = [name or call.function.name, arguments + (call.function.arguments or "")]
        elif event.type in ("response.completed", "response.incomplete"):
            return parts_of_whole(event.response)
        elif event.type == "content_block_start" and event.content_block.type == "tool_use":
            calls.append([event.content_block.name, ""])
        elif event.type == "content_block_delta":
            text += getattr(event.delta, "text", "")
            if event.delta.type == "input_json_delta":
                calls[-1][1] += event.delta.partial_json
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def rendered(request):
    """The prompt that a template makes of a request, as its client means it."""
    body = request["body"]
    turns = RENDERED if "Be brief." in json.dumps(body) else RENDERED.partition("|")[2]
    called = RESULT if "result" in request["name"] else ""
    if any(each.get("content") == " " for each in body.get("messages", ())):
        called = called.replace("<assistant>", "<assistant> ")  # Continue sends no empty texts
    return (TOOL if body.get("tools") else "") + turns + called + "<assistant>"


LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
SCHEMAS = [case for case in CASES if "schema" in case.values[0]["name"]]


@pytest.mark.parametrize("request_", [case for case in CASES if case not in SCHEMAS])
def test_the_text_is_that_of_plain_decoding(clients, request_):
    body, usual = request_["body"], clients.service.settings.answer_tokens
    length = next((body[name] for name in LIMITS if name in body), usual)
    text, calls = answer(clients, request_, temperature=0, lookahead={"budget": 8})
    ids = TOKENIZER(rendered(request_))["input_ids"]
    assert (text, calls) == (text_of(plain(ids, max_new_tokens=length)), [])


THEN_ENDS = {"min_tokens": len(CALLING), "logit_bias": {"0": 100}, "lookahead": None}


@pytest.mark.parametrize("request_", [case for case in CASES if "tools" in case.values[0]["name"]])
def test_calls_are_what_clients_can_parse(clients, monkeypatch, request_):
    with monkeypatch.context() as patch:
        scripted(patch, CALLING)
        found = answer(clients, request_, **THEN_ENDS)
    assert found == ("I look.", [("weather", {"city": "Oslo"})])


@pytest.mark.parametrize("request_", SCHEMAS)
def test_schemas_are_followed(clients, monkeypatch, request_):
    limit = next(name for name in LIMITS if name in request_["body"])
    text, calls = answer(clients, request_, **{limit: 60}, temperature=0)
    assert re.match(r'\{\s*"city"\s*:\s*"', text) and not calls
    with monkeypatch.context() as patch:
        scripted(patch, SCHEMA)
        assert json.loads(answer(clients, request_)[0]) == {"city": "Oslo", "celsius": 7}
