"""`/v1/messages`: what the chat API answers, as blocks and events, for the `anthropic` package and as recorded."""

import re

import anthropic
import pytest
from scripted import frames
from served import plain, running, templated, text_of
from spies import failing

from lade.server import routes
from lade.server.errors import ApiError
from lade.server.keys import Key, Keys
from lade.server.messages import MessagesRequest, as_chat

GREEDY = {"extra_body": {"temperature": 0}}
MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def chat_of(*messages, **fields):
    return as_chat(MessagesRequest.model_validate({"max_tokens": 5, "messages": list(messages), **fields}))


def made_of(body):
    """Roles and contents, with the texts of parts in one."""

    def text(content):
        return content if isinstance(content, str) else "".join(part.text or "?" for part in content or ())

    return [{**each.model_extra, "role": each.role, "content": text(each.content)} for each in body.messages]


def test_a_message_is_what_the_chat_api_says(server, client):
    tokens = plain(templated([{"role": "system", "content": "be brief"}, *MESSAGES]), max_new_tokens=20)
    asked = {"model": "toy", "max_tokens": 20, "system": "be brief", "messages": MESSAGES}
    answer = client.messages.create(**asked, **GREEDY)
    (block,) = answer.content
    assert (block.type, block.text) == ("text", text_of(tokens)) and answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 20 and answer.id.startswith("msg_") and answer._request_id
    prompt = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert (
        prompt
        == client.messages.count_tokens(**{name: asked[name] for name in ("model", "system", "messages")}).input_tokens
    )
    with client.messages.stream(**asked, **GREEDY) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 20)
    stop = block.text[7:10]
    cut = client.messages.create(**asked, **GREEDY, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == block.text.partition(stop)[0]


def test_the_frames_of_a_stream(server):
    body = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "model": "toy"}
    events = frames(server, "/v1/messages", **body)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    whole = server.http.post("/v1/messages", json=body).json()
    text = "".join(data["delta"]["text"] for _, data in events[2:-3])
    assert whole["content"] == [{"type": "text", "text": text}] and text == text_of(
        plain(templated(MESSAGES), max_new_tokens=9)
    )
    message = events[0][1]["message"]
    assert message["content"] == [] and message["usage"]["input_tokens"] > 0 == message["usage"]["output_tokens"]
    assert events[-2][1]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2][1]["usage"]["output_tokens"] == 9 and events[-1][1] == {"type": "message_stop"}


def test_blocks_become_messages():
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    call = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]}
    body = chat_of(
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I add."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "so?"}]},
        {"role": "system", "content": "be nice"},
        {"role": "assistant", "content": "It is "},
        system=[{"type": "text", "text": "x-anthropic-billing-header: cc=1"}, {"type": "text", "text": "be brief"}],
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        thinking={"type": "enabled", "budget_tokens": 1024},
        stop_sequences=["."],
        top_k=5,
    )
    function = {"name": "add", "arguments": '{"a": 1}'}
    assert made_of(body) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "t1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "add", "content": "2"},
        {"role": "user", "content": "so?\n\nbe nice"},
        {"role": "assistant", "content": "It is "},
    ]
    described = {"name": "add", "description": "adds", "parameters": TOOL["input_schema"]}
    assert body.tools == [{"type": "function", "function": described}]
    assert "tools.web_search_20250305" in body.model_extra and body.continue_final_message
    assert (body.stop, body.top_k, body.max_tokens) == (["."], 5, 5)
    assert body.chat_template_kwargs == {"enable_thinking": True}
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    (message,) = chat_of({"role": "user", "content": [picture]}).messages
    assert message.content[0].image_url.url == "data:image/png;base64,AAAA"
    assert chat_of(*MESSAGES, tool_choice={"type": "any"}).tool_choice == "required"
    named = chat_of(*MESSAGES, tool_choice={"type": "tool", "name": "add"}).tool_choice
    assert named == {"type": "function", "function": {"name": "add"}}


def test_documents_of_text_are_shown(server, client):
    source = {"type": "text", "media_type": "text/plain", "data": "It rained."}
    titled = {"type": "document", "source": source, "title": "Weather", "context": "of May"}
    inner = {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "document", "source": inner}]}
    question = {"type": "text", "text": "And then?"}
    body = chat_of(
        {"role": "user", "content": [result, titled, {**titled, "source": {**inner, "content": "c"}}, question]}
    )
    assert [each["content"] for each in made_of(body)] == [
        "ab\n\n",
        "Weather\n\nof May\n\nIt rained.\n\nWeather\n\nof May\n\nc\n\nAnd then?",
    ]
    content = [{"type": "document", "source": source, "citations": {"enabled": True}}, question]
    asked = {"model": "toy", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    raw = client.messages.with_raw_response.create(**asked, **GREEDY)
    seen = templated([{"role": "user", "content": "It rained.\n\nAnd then?"}])
    assert raw.parse().content[0].text == text_of(plain(seen, max_new_tokens=9))
    assert raw.headers["x-lade-ignored"] == "citations"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "document", "source": {"type": "text"}}], "messages[0].content[0].source"),
        ([{"type": "document", "source": {"type": "url", "url": "http://x/y"}}], "messages[0].content[0].source"),
        ([{"type": "document", "source": {"type": "file", "file_id": "x"}}], "messages[0].content[0].source"),
        ([{"type": "document"}], "messages[0].content[0].source"),
        (
            [{"type": "document", "source": {"type": "content", "content": [{"type": "image"}]}}],
            "messages[0].content[0].source.content[0]",
        ),
        ([{"type": "tool_result", "content": "x"}], "messages[0].content[0].tool_use_id"),
        ([{"type": "text"}], "messages[0].content[0]"),
        ([], "messages"),
    ],
)
def test_what_cannot_be_shown_is_refused(content, param):
    with pytest.raises(ApiError) as raised:
        chat_of({"role": "user", "content": content})
    assert (raised.value.status, raised.value.param) == (400, param)


def test_refusals_have_anthropics_form(server, client):
    def refused(status, kind, path="/v1/messages", **fields):
        given = {"json": {"max_tokens": 3, "messages": MESSAGES, **fields}}
        answer = server.http.request("POST", path, **given)
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["request_id"] == answer.headers["request-id"]
        return body["error"]["message"]

    assert "max_tokens" in refused(400, "invalid_request_error", max_tokens=None)
    assert "toy, other-name" in refused(404, "not_found_error", model="nobody")
    assert "messages[1].role" in refused(
        400, "invalid_request_error", messages=[*MESSAGES, {"role": "x", "content": ""}]
    )
    assert "mcp_servers" in refused(400, "invalid_request_error", mcp_servers=[{}])
    refused(404, "not_found_error", "/v1/messages/nothing")
    answer = server.http.post("/v1/messages", data={"a": "b"})
    assert answer.status_code == 415 and answer.json()["error"]["type"] == "invalid_request_error"
    too_long = [{"role": "user", "content": "x" * 600}]
    tokens = len(templated(too_long))
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(model="toy", max_tokens=1, messages=too_long)
    error = raised.value.body["error"]
    assert error == {"type": "invalid_request_error", "message": f"prompt is too long: {tokens} tokens > 511 maximum"}
    long = "x" * (600 - tokens + 511)
    whole = client.messages.create(model="toy", max_tokens=5, messages=[{"role": "user", "content": long}])
    assert whole.usage.output_tokens == 1


def test_what_nobody_foresaw_has_this_form_too(server, monkeypatch):
    failing(monkeypatch, routes, "_tokenized", ZeroDivisionError("secret"))
    answer = server.http.post("/v1/messages/count_tokens", json={"messages": MESSAGES})
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (500, "error", "api_error")
    assert body["request_id"] in body["error"]["message"] and "secret" not in answer.text


def test_a_key_comes_as_anthropics_clients_send_it():
    asked = {"model": "toy", "max_tokens": 2, "messages": MESSAGES}
    with running(keys=Keys((Key("a", "sk-1"),))) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="sk-1", max_retries=0)
        with client, pytest.raises(anthropic.AuthenticationError):
            assert client.messages.create(**asked).content
            assert [model.id for model in client.models.list()] == ["toy", "other-name"]
            client.with_options(api_key="sk-2").messages.create(**asked)


def test_texts_become_ids_and_ids_texts(server):
    def post(path, **body):
        answer = server.http.post(path, json=body)
        return answer.json() if answer.status_code == 200 else answer.json()["error"]["param"]

    ids = templated([{"role": "user", "content": "abc"}])
    made = post("/tokenize", prompt="<user>abc|<assistant>")
    assert made["tokens"] == ids == post("/tokenize", messages=[{"role": "user", "content": "abc"}])["tokens"]
    assert made["count"] == len(ids) and made["max_model_len"] == 512
    assert post("/detokenize", tokens=ids) == {"prompt": "<user>abc|<assistant>"}
    assert post("/detokenize", tokens=[10**6]) == "tokens" and post("/tokenize", prompt=3) == "prompt"
    assert post("/tokenize", prompt="x", model="nobody") == "model"


def test_the_python_blocks_of_the_documentation_run(server, capsys):
    server.run_documented("other-apis.md")
    count = len(templated([{"role": "user", "content": "Why is the sky blue?"}]))
    (tokens,) = re.findall(rf" (\d+)\n{count}\n\Z", capsys.readouterr().out)
    assert 1 <= int(tokens) <= 20
