"""`/v1/responses`: what the chat API answers, as items and events, for the `openai` package and as recorded."""

import openai
import pytest
from scripted import frames
from served import plain, templated, text_of

from lade.server.choice import ChoiceDelta, OutputItems
from lade.server.errors import ApiError
from lade.server.output_parser import Parts, ToolCall
from lade.server.responses import ResponsesRequest, as_chat
from lade.stats import Step

MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat_of(**fields):
    return as_chat(ResponsesRequest.model_validate(fields))


def test_a_response_is_what_the_chat_api_says(server, client):
    tokens = plain(templated(MESSAGES), max_new_tokens=20)
    answer = client.responses.create(model="toy", input="hello", temperature=0, max_output_tokens=20)
    assert answer.output_text == text_of(tokens) and answer.model == "toy"
    assert answer.usage.input_tokens == len(templated(MESSAGES)) and answer.usage.output_tokens == len(tokens)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    (item,) = answer.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "incomplete")
    assert answer.id.startswith("resp_") and answer.to_dict()["store"] is False
    chat = server.chat(seed=5, max_tokens=20).json()["choices"][0]["message"]["content"]
    assert client.responses.create(input="hello", max_output_tokens=20, extra_body={"seed": 5}).output_text == chat


def test_the_frames_of_a_stream(server):
    body = {"input": "hello", "temperature": 0, "max_output_tokens": 12}
    text = text_of(plain(templated(MESSAGES), max_new_tokens=12))
    events = frames(server, "/v1/responses", **body)
    names = [name for name, _ in events]
    begun = ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    ended = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert names[:4] == begun and names[-4:] == [*ended, "response.incomplete"]
    assert set(names[4:-4]) == {"response.output_text.delta"} and len(names) > 9
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    assert "".join(data["delta"] for _, data in events[4:-4]) == text == events[-4][1]["text"]
    created, last = events[0][1]["response"], events[-1][1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert events[2][1]["item"] == {**last["output"][0], "status": "in_progress", "content": []}
    assert last["output"] == [events[-2][1]["item"]] and last["id"] == created["id"]
    whole = server.http.post("/v1/responses", json=body).json()
    changing = {"id", "created_at", "completed_at", "lade", "output", "usage"}
    assert {name: last[name] for name in last.keys() - changing} == {
        name: whole[name] for name in whole.keys() - changing
    }
    assert whole["output"][0]["content"] == last["output"][0]["content"]


def test_openais_helper_for_streams_takes_it_to_its_end(server, client):
    stop = text_of(plain(templated(MESSAGES), max_new_tokens=20))[9:12]
    arguments = {"model": "toy", "input": "hello", "temperature": 0, "extra_body": {"stop": stop}}
    with client.responses.stream(**arguments) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    whole = client.responses.create(**arguments)
    assert "".join(deltas) == final.output_text == whole.output_text and final.status == whole.status == "completed"
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_thoughts_text_and_calls_are_items_of_their_own():
    items, calls = OutputItems(), [ToolCall(0, '{"a": 1}', "call_1", "add"), ToolCall(1, '{"a": 1}', "call_2", "add")]
    parts = [Parts("", "hm"), Parts("", "m"), Parts("yes", " ok"), Parts("!", "", calls)]
    step = Step(0, [1], ["bonus"], 1, 0.0)
    deltas = [*(ChoiceDelta(each, step) for each in parts), ChoiceDelta(Parts())]
    changes = [change for delta in deltas for change in items.take(delta)]
    assert [(change.event, change.item.index, change.text) for change in changes] == [
        ("added", 0, ""), ("delta", 0, "hm"), ("delta", 0, "m"), ("delta", 0, " ok"), ("done", 0, ""),
        ("added", 1, ""), ("delta", 1, "yes"), ("delta", 1, "!"), ("done", 1, ""),
        ("added", 2, ""), ("delta", 2, '{"a": 1}'), ("done", 2, ""),
        ("added", 3, ""), ("delta", 3, '{"a": 1}'), ("done", 3, ""),
    ]  # fmt: skip
    assert [item.kind for item in items.all] == ["reasoning", "text", "call", "call"]
    silent = OutputItems()
    assert [change.event for change in silent.take(ChoiceDelta(Parts()))] == ["added", "done"]
    assert silent.all[0].text == ""


def test_items_become_messages():
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add."}]}
    body = chat_of(
        instructions="be brief",
        input=[
            {"role": "developer", "content": "one"},
            {"role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
            thought, said, call, {**call, "call_id": "c2"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
            {"role": "assistant", "content": "two"}, {"role": "user", "content": "thanks"},
        ],
        tools=[TOOL, {"type": "web_search"}],
        text={"format": {"type": "text"}},
        reasoning={"effort": "low"},
        store=True,
        client_metadata={"x": "y"},
        include=["reasoning.encrypted_content"],
    )  # fmt: skip
    made = [{"role": each.role, "content": each.content, **each.model_extra} for each in body.messages]
    function = {"name": "add", "arguments": '{"a": 1}'}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2")]
    assert [each["role"] for each in made] == ["system", "developer", "user", "assistant", "tool", "assistant", "user"]
    assert made[3]["reasoning_content"] == "hm" and made[3]["tool_calls"] == calls
    assert made[3]["content"][0].text == "I add." and made[2]["content"][0].text == "1+1?"
    assert made[4] == {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"}
    assert body.tools == [{"type": "function", "function": {"name": "add", "parameters": TOOL["parameters"]}}]
    assert body.reasoning_effort == "low" and "tools.web_search" in body.model_extra


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
    ],
)
def test_what_would_have_to_be_kept_or_is_no_item_is_refused(fields, param):
    with pytest.raises(ApiError) as raised:
        chat_of(**{"input": "x", **fields})
    assert (raised.value.status, raised.value.param) == (400, param) and ":" in raised.value.message


def test_refusals_reach_the_client(server, client):
    with pytest.raises(openai.BadRequestError, match="send all items in input") as raised:
        client.responses.create(input="x", previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="must be at the beginning") as raised:
        client.responses.create(input=[{"role": "user", "content": "x"}, {"role": "system", "content": "late"}])
    assert raised.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="nobody", input="x")
    answer = server.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 1, "tools": [{"type": "mcp"}]})
    assert answer.status_code == 200 and answer.headers["x-lade-ignored"] == "tools.mcp"


@pytest.mark.parametrize(
    ("format_", "param"),
    [
        ({"type": "xml"}, "text.format.type"),
        ({"type": "json_schema", "name": "x"}, "text.format.schema"),
        ({"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}, "text.format.schema"),
        ({"type": "json_object", "schema": {"type": "nothing"}}, "text.format.schema"),
    ],
)
def test_what_is_wrong_with_a_form_is_told_by_the_names_of_this_api(server, format_, param):
    answer = server.http.post("/v1/responses", json={"input": "x", "text": {"format": format_}})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, answer.text
    assert error["message"].startswith("text.format") and "response_format" not in error["message"]


def test_the_name_of_a_field_in_a_message_is_the_one_of_this_api(server):
    body = {"input": "x", "text": {"format": {"type": "json_object"}}, "ignore_eos": True}
    error = server.http.post("/v1/responses", json=body).json()["error"]
    assert error["message"] == "ignore_eos: not available with text.format, which determines the end: leave it out"


def test_tokens_of_an_input_are_counted(server, client):
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    asked = {
        "model": "toy",
        "instructions": "be brief",
        "input": [{"role": "user", "content": "hello"}],
        "tools": [tool],
    }
    counted = client.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == client.responses.create(**asked, max_output_tokens=1).usage.input_tokens
    refused = server.http.post("/v1/responses/input_tokens", json={"input": "x", "previous_response_id": "y"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "previous_response_id"
    assert server.http.post("/v1/responses/input_tokens", json={**asked, "model": "nobody"}).status_code == 404
