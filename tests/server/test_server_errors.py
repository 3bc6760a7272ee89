"""What clients are told that ask for what cannot be done."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from served import CONTEXT, SERVED, TOKENIZER, byte_tokenizer, running, templated

from lade.server import errors

HI = [{"role": "user", "content": "hi"}]
INVALID = "invalid_request_error"


def check(response, status, kind, code, param=None):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert (response.status_code, error["type"], error["code"], error["param"]) == (status, kind, code, param)
    assert response.headers["x-request-id"]
    return error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"messages": None}, "messages", "list"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string"),
        ({"messages": [*HI, {"content": "x"}]}, "messages[1].role", "required"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type", "required"),
        ({"temperature": -0.5}, "temperature", "(got -0.5)"),
        ({"temperature": "warm"}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 17}, "n", "16"),
        ({"n": True}, "n", "integer"),
        ({"seed": "5"}, "seed", "integer"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": "0.5"}, "top_p", "number"),
        ({"stream": "true"}, "stream", "boolean"),
        ({"logprobs": 1}, "logprobs", "boolean"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]", "integer"),
        ({"logit_bias": {"1": "5"}}, "logit_bias.1", "number"),
        ({"max_tokens": 0}, "max_tokens", "1"),
        ({"stop": [""]}, "stop[0]", "at least 1"),
        ({"stop": ["x" * 257]}, "stop[0]", "256"),
        ({"stop": ["x"] * 17}, "stop", "16"),
        ({"seed": 2**64}, "seed", ""),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", "100"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "vocabulary"),
        ({"presence_penalty": 3}, "presence_penalty", "2"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"lookahead": {"budget": 0}}, "lookahead.budget", "budget=0"),
        ({"lookahead": {"width": 3}}, "lookahead.width", "unknown field"),
        ({"continue_final_message": True}, "continue_final_message", "assistant"),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize", "template"),
        ({"generation_config": "{"}, "generation_config", "JSON"),
        ({"generation_config": '{"temperature": -1}'}, "generation_config", "temperature"),
        ({"prediction": "text"}, "prediction", "dictionary"),
        ({"prediction": {"type": "content"}}, "prediction.content", "required"),
        ({"prediction": {"type": "file", "content": "a"}}, "prediction.type", "'content'"),
    ],
)
def test_a_wrong_value_is_named(server, fields, param, word):
    response = server.http.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert word in check(response, 400, INVALID, "invalid_value", param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"tool_choice": "required", "tools": [{"function": {"name": "f"}}]}, "tool_choice"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{}]}, "functions"),
        ({"grammar": 'root ::= "x"'}, "grammar"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}
                ]
            },
            "messages[0].content[0]",
        ),
    ],
)
def test_what_is_not_served_is_refused(server, fields, param):
    response = server.http.post("/v1/chat/completions", json={"messages": HI, **fields})
    check(response, 400, INVALID, "unsupported_parameter", param)


def test_prompts_of_completions_are_checked(server):
    check(server.complete(5), 400, INVALID, "invalid_value", "prompt")
    assert "at least 1 item" in check(server.complete([]), 400, INVALID, "invalid_value", "prompt")
    assert "at least 1 item" in check(server.complete([[]]), 400, INVALID, "invalid_value", "prompt[0]")
    assert "257" in check(server.complete([[5], [9999]]), 400, INVALID, "invalid_value", "prompt")
    check(server.complete("", max_tokens=3), 400, INVALID, "invalid_value")
    check(server.complete("x", suffix="y"), 400, INVALID, "unsupported_parameter", "suffix")
    assert "n=3" in check(server.complete("x", n=2, best_of=3), 400, INVALID, "unsupported_parameter", "best_of")
    assert [server.complete(prompt).status_code for prompt in (["1", True], [1, True], ["1", 1])] == [400] * 3
    check(server.complete("x", logprobs=True), 400, INVALID, "invalid_value", "logprobs")
    check(server.complete("x", echo="yes"), 400, INVALID, "invalid_value", "echo")
    check(server.complete("x", prompt_logprobs=0), 400, INVALID, "unsupported_parameter", "prompt_logprobs")
    assert "echo" in check(server.complete("x", max_tokens=0), 400, INVALID, "invalid_value", "max_tokens")
    many = {"echo": True, "logprobs": 20, "max_tokens": 0, "n": 16}
    message = check(server.complete([[65] * 400] * 2, **many), 400, INVALID, "invalid_value", "prompt")
    assert "800 tokens" in message and "fewer prompts" in message


def test_a_text_or_a_conversation_is_tokenized_and_not_both(server):
    response = server.http.post("/tokenize", json={"prompt": "abc", "messages": HI})
    assert "leave out one of them" in check(response, 400, INVALID, "invalid_value", "prompt")
    for alone in ({"prompt": "abc"}, {"messages": HI}):
        assert server.http.post("/tokenize", json=alone).json()["count"] > 0


@pytest.mark.parametrize(
    ("path", "field"), [("completions", "prompt"), ("chat/completions", "messages"), ("responses", "input")]
)
def test_a_prompt_as_long_as_the_context_is_refused_in_the_words_that_clients_look_for(server, path, field):
    given = [{"role": "user", "content": "x" * CONTEXT}] if field == "messages" else "x" * CONTEXT
    response = server.http.post(f"/v1/{path}", json={field: given, "stream": True})
    message = check(response, 400, INVALID, "context_length_exceeded", field)
    found = re.fullmatch(
        r"This model's maximum context length is (\d+) tokens. However, you requested (\d+) tokens "
        r"\((\d+) in the (\w+), at least 1 for the completion\). Please reduce the length of the (\w+).",
        message,
    )
    tokens = len(templated([{"role": "user", "content": given}])) if field == "input" else CONTEXT
    tokens = len(templated(given)) if field == "messages" else tokens
    assert found.groups() == (str(CONTEXT), str(tokens + 1), str(tokens), field, field)


def test_a_text_for_which_there_is_never_room_and_more_answers_than_places_are_refused():
    with running(max_tokens=200, max_rows=2, max_waiting=3) as server:
        check(server.complete([65] * 300, max_tokens=5), 400, INVALID, "too_large_for_server")
        assert server.complete([65] * 30, max_tokens=5).status_code == 200
        message = check(server.complete(["a", "b"], n=3), 400, INVALID, "too_large_for_server")
        assert "6 choices" in message and "at most 5" in message
        assert server.complete(["a"], n=5, max_tokens=1).status_code == 200


NO_JSON = [b"{", b"", b"[1", b"\xff\xfe", b'{"a":' * 5000, b'{"messages": ' + b"1" * 10**6 + b"}", b'"\x00"']
NO_OBJECTS = [b"[]", b"3", b"null", b'"text"']


@pytest.mark.parametrize("body", NO_JSON + NO_OBJECTS, ids=range(11))
def test_what_is_no_object_in_json_is_refused(server, body):
    response = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    check(response, 400, INVALID, "invalid_json" if body in NO_JSON else "invalid_value")


def test_forms_and_compressed_bodies_are_refused_as_that(server):
    response = server.http.post("/v1/chat/completions", content='{"messages": []}')
    assert "content-type: application/json" in check(response, 415, INVALID, "unsupported_media_type")
    headers = {"content-type": "application/json", "content-encoding": "zstd"}
    response = server.http.post("/v1/chat/completions", content=b"(\xb5/\xfd", headers=headers)
    assert "zstd" in check(response, 415, INVALID, "unsupported_media_type")
    headers["content-encoding"] = "identity"
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    assert server.http.post("/v1/chat/completions", content=body, headers=headers).status_code == 200


def test_a_large_body_is_refused_however_it_comes(server):
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 5 * 2**20}]}).encode()
    headers, path = {"content-type": "application/json"}, "/v1/chat/completions"
    for _ in range(5):  # the answer must not be lost on a client that still sends
        check(server.http.post(path, content=body, headers=headers), 413, INVALID, "request_too_large")
    parts = (body[at : at + 2**20] for at in range(0, len(body), 2**20))  # of no length that is known before
    check(server.http.post(path, content=parts, headers=headers), 413, INVALID, "request_too_large")


def test_names_that_are_not_served(server):
    message = check(server.chat(model="gpt-5"), 404, "not_found_error", "model_not_found", "model")
    assert "toy, other-name" in message
    assert server.chat(model="other-name", max_tokens=2).json()["model"] == "toy"
    check(server.http.get("/v1/models/gpt-5"), 404, "not_found_error", "model_not_found", "model")


def test_unknown_fields_are_ignored_and_named(server):
    response = server.chat(max_tokens=2, banana=1, **{"ev\nil": 2})
    assert response.status_code == 200 and response.headers["x-lade-ignored"] == "?, banana"
    response = server.chat(max_tokens=2, web_search_options={}, modalities=["text"], suffix="", functions=[])
    assert response.headers["x-lade-ignored"] == "web_search_options"


EFFECTLESS = {"user": "me", "metadata": {"a": "b"}, "service_tier": "flex", "safety_identifier": "x"}
EFFECTLESS |= {"prompt_cache_key": "y", "store": True}
ANYWAY = {"user": None, "metadata": {}, "service_tier": "auto", "store": False, "verbosity": "medium"}
OTHER_TOOL = {"type": "custom", "custom": {"name": "patch"}}
A_TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "fields", "ignored"),
    [
        ("chat/completions", EFFECTLESS, sorted(EFFECTLESS)),
        ("completions", EFFECTLESS, sorted(EFFECTLESS)),
        ("chat/completions", ANYWAY, []),
        ("chat/completions", {"verbosity": "low", "reasoning_effort": "low"}, ["reasoning_effort", "verbosity"]),
        ("chat/completions", {"tools": [A_TOOL, OTHER_TOOL]}, ["tools.custom"]),
        ("chat/completions", {"tools": [OTHER_TOOL, {"type": ["x"]}]}, ["?", "tools.custom"]),
        ("chat/completions", {"chat_template_kwargs": {"role": 1, "tone": 2}}, ["chat_template_kwargs.tone"]),
        ("responses", {**EFFECTLESS, "client_metadata": {"a": "b"}}, ["client_metadata", *sorted(EFFECTLESS)]),
        ("responses", {"include": ["reasoning.encrypted_content"], "truncation": "auto"}, ["include", "truncation"]),
        ("responses", {"include": [], "truncation": "disabled", "text": {"verbosity": "medium"}}, []),
        ("responses", {"reasoning": {"effort": "low", "summary": "auto"}}, ["reasoning.effort", "reasoning.summary"]),
        ("responses", {"text": {"verbosity": "high"}, "reasoning": {}}, ["text.verbosity"]),
        ("messages", {"metadata": {"user_id": "a"}, "service_tier": "standard_only"}, ["metadata"]),
        ("messages", {"thinking": {"type": "enabled", "budget_tokens": 9}}, ["thinking", "thinking.budget_tokens"]),
    ],
)
def test_fields_without_effect_are_named(server, path, fields, ignored):
    given = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(path, {"messages": HI})
    response = server.http.post(f"/v1/{path}", json={**given, "max_tokens": 2, **fields})
    assert response.status_code == 200, response.text
    assert response.headers.get("x-lade-ignored", "") == ", ".join(ignored)


def test_what_a_template_takes_notice_of_is_not_ignored():
    template = TOKENIZER.chat_template + "{% if enable_thinking or reasoning_effort %}{% endif %}"
    with running(replace(SERVED, tokenizer=byte_tokenizer(template))) as server:
        assert "x-lade-ignored" not in server.chat(max_tokens=2, reasoning_effort="low").headers
        asked = {"messages": HI, "max_tokens": 2, "thinking": {"type": "enabled"}}
        assert "x-lade-ignored" not in server.http.post("/v1/messages", json=asked).headers
        asked = {"input": "x", "max_output_tokens": 2, "reasoning": {"effort": "low"}}
        assert "x-lade-ignored" not in server.http.post("/v1/responses", json=asked).headers


def test_strictly_unknown_fields_are_refused():
    with running(strict=True) as server:
        check(server.chat(banana=1), 400, INVALID, "invalid_value", "banana")
        check(server.chat(tools=[OTHER_TOOL]), 400, INVALID, "invalid_value", "tools.custom")
        assert server.chat(max_tokens=2, **EFFECTLESS).headers["x-lade-ignored"] == ", ".join(sorted(EFFECTLESS))
        assert server.chat(max_tokens=2).status_code == 200


def test_half_a_character_is_no_text(server):
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    response = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    check(response, 400, INVALID, "invalid_value", "messages[0].content")
    body = b'{"messages": [{"role": "user", "content": "x", "name": "\\ud800"}], "max_tokens": 2}'
    response = server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200


def test_methods_that_a_path_does_not_take(server):
    for method in ("GET", "PUT", "PATCH", "DELETE", "TRACE"):
        check(server.http.request(method, "/v1/completions"), 405, INVALID, "unknown_url")
    for method in ("POST", "TRACE"):
        check(server.http.request(method, "/live"), 405, INVALID, "unknown_url")
    check(server.http.post("/v1/nothing"), 404, "not_found_error", "unknown_url")


def test_the_base_url_says_what_there_is(server):
    for path in ("/v1", "/v1/"):
        answer = server.http.get(path)
        assert answer.status_code == 200 and "base URL" in answer.json()["message"]
        described = server.http.get("/openapi.json").json()["paths"]
        listed = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
        assert set(answer.json()["routes"]) == listed


def test_answers_are_described_as_they_are(server):
    described = server.http.get("/openapi.json").json()
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            found = operation["responses"]
            assert found.keys() >= {"200", "4XX", "5XX"} and "422" not in found, (method, path)
    chat = described["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert chat["200"]["content"].keys() == {"application/json", "text/event-stream"}
    jsonschema.validate(server.chat(max_tokens=1).json(), chat["200"]["content"]["application/json"]["schema"])
    refused = server.chat(temperature=-1).json()
    jsonschema.validate(refused, chat["4XX"]["content"]["application/json"]["schema"])
    anthropic = described["paths"]["/v1/messages"]["post"]["responses"]["4XX"]["content"]["application/json"]["schema"]
    jsonschema.validate(server.http.post("/v1/messages", json={}).json(), anthropic)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(refused, anthropic)


def test_request_ids_go_in_and_out(server):
    assert server.http.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert server.http.get("/version", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req-")


NULLS = "best_of n stream stream_options min_tokens ignore_eos skip_special_tokens return_token_ids lade seed stop"


def test_a_null_is_as_good_as_a_field_that_is_left_out(server):
    nulls = dict.fromkeys(NULLS.split()) | {"temperature": 0, "max_tokens": 5}
    left_out = server.complete(temperature=0, max_tokens=5).json()["choices"]
    assert server.complete(**nulls, echo=None, logprobs=None, suffix=None).json()["choices"] == left_out
    assert server.complete(temperature=0, max_tokens=5, n=2, best_of=2).json()["choices"][:1] == left_out
    more = dict.fromkeys(["logprobs", "top_logprobs", "tools", "add_generation_prompt", "continue_final_message"])
    answers = [server.chat(temperature=0, max_tokens=5).json(), server.chat(**nulls, **more).json()]
    assert answers[0]["choices"] == answers[1]["choices"]
    streamed = {**nulls, "stream": True, "stream_options": {"include_usage": None}}
    assert server.chat(**streamed).text.endswith("data: [DONE]\n\n")


def test_values_are_strict_and_nulls_defaults_in_all_apis(server):
    responses, messages = {"input": "x"}, {"messages": HI, "max_tokens": 2}
    for path, body, wrong in (
        ("/v1/responses", responses, {"max_output_tokens": "5"}),
        ("/v1/responses", responses, {"parallel_tool_calls": "no"}),
        ("/v1/messages", messages, {"max_tokens": True}),
        ("/v1/messages", messages, {"thinking": {"type": "enabled", "budget_tokens": "9"}}),
        ("/tokenize", {"prompt": "x"}, {"add_special_tokens": "yes"}),
        ("/detokenize", {}, {"tokens": ["1"]}),
    ):
        assert server.http.post(path, json={**body, **wrong}).status_code == 400, wrong
    nulls = {"stream": None, "n": None, "temperature": 0, "stop_sequences": None}
    assert server.http.post("/v1/responses", json={**responses, **nulls, "max_output_tokens": 2}).status_code == 200
    assert server.http.post("/v1/messages", json={**messages, **nulls}).status_code == 200


CODE_ARGUMENTS = {"ApiError": None, "overloaded": 1, "invalid": 2}
"""Functions that make errors, and the position of their `code`; None if it is named only."""


def codes_raised():
    """The codes of all errors in the server's code, with the line of each."""
    for path in sorted(Path(errors.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "id", None)
            if not isinstance(node, ast.Call) or name not in CODE_ARGUMENTS:
                continue
            at, named = CODE_ARGUMENTS[name], {each.arg: each.value for each in node.keywords}
            code = named.get("code", node.args[at] if at is not None and len(node.args) > at else None)
            if code is None:
                assert name == "invalid", f"{path.name}:{node.lineno} has no code"
            elif not (isinstance(code, ast.Name) and code.id == "code"):  # handed on
                yield code.value if isinstance(code, ast.Constant) else getattr(errors, code.id)


def test_every_code_is_documented():
    page = Path(__file__).parents[2].joinpath("docs", "reference", "errors.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert documented == sorted({*codes_raised(), "invalid_value"})
