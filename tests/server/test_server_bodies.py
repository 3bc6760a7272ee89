"""Requests as Codex and Claude Code send them, member by member: `bodies/` names where each form was found.

What a model sees of them is told by a chat template that shows all of it; the answers are plain decoding's.
"""

import json
import time
from dataclasses import replace
from pathlib import Path

import anthropic
import pytest
from scripted import AGENTS, frames, scripted
from served import SERVED, Passes, byte_tokenizer, plain, running, slow_served, text_of

TOKENIZER = byte_tokenizer(AGENTS)
BODIES = Path(__file__).parent / "bodies"
PATHS = {"codex": "/v1/responses", "claude_code": "/v1/messages?beta=true"}
GREEDY = {"temperature": 0, "lookahead": None}
OFFERED = {
    "codex": "[exec_command][write_stdin][update_plan]{}[list_mcp_resources][read_mcp_resource][view_image]"
    "[collaboration__spawn_agent][collaboration__wait_agent][collaboration__close_agent]"
    "[mcp__tickets__find][mcp__tickets__close]",
    "claude_code": "[Task][TaskOutput][Bash][Grep][ExitPlanMode][Read][Edit][NotebookEdit][WebFetch][TaskUpdate]"
    "[TaskList][mcp__tickets__find]{}",
}
NEWEST = {"codex": "[request_user_input]", "claude_code": "[ReportFindings][Workflow]"}
CODEX = (
    "<user><environment_context><cwd>/a</cwd><shell>bash</shell></environment_context>|<user>Which tickets are open?|"
)
CLAUDE_CODE = "<system>Be a coder.\n\n\nBe brief.|<user><system-reminder>the date</system-reminder>\nWhich files?"
SEEN = {
    ("codex", 0): f"<system>Be a coder.|<system><skills>none</skills>|{CODEX}",
    ("codex", 1): f"<system>Be a coder.|<system><permissions>read only</permissions>|{CODEX}"
    '<assistant>(look first)I look.!mcp__tickets__find{"query": "open"}|<tool>two: 7, 9|'
    '<assistant>(and files)!exec_command{"cmd": "ls"}|<tool>Exit code: 0\nOutput:\na b|'
    '<assistant>!apply_patch{"input": "*** Begin Patch"}|<tool>done|<user>ready|<user>Go on.|',
    ("claude_code", 0): f"{CLAUDE_CODE}\n\nThere is one agent.|",
    (
        "claude_code",
        1,
    ): f'{CLAUDE_CODE}|<assistant>(look first)I look.!Bash{{"command": "ls"}}!Read{{"file_path": "/a"}}|'
    "<tool>a b|<tool>1\tno|<user>Be quick.|<assistant>Two files.|<user>And now?|",
}
CODEX_IGNORED = "client_metadata include prompt_cache_key reasoning.summary tools.custom tools.web_search"
CLAUDE_CODE_IGNORED = "context_management metadata output_config.effort thinking tools.web_search_20250305"
IGNORED = {
    ("codex", 0): CODEX_IGNORED,
    ("codex", 1): f"{CODEX_IGNORED} reasoning.effort service_tier",
    ("claude_code", 0): CLAUDE_CODE_IGNORED,
    ("claude_code", 1): f"{CLAUDE_CODE_IGNORED} betas thinking.budget_tokens",
}


def recorded(client):
    return json.loads((BODIES / f"{client}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def agents():
    with running(replace(SERVED, tokenizer=TOKENIZER, context=2048), max_rows=2) as server:
        yield server


def sent(server, client, number, **more):
    found = recorded(client)
    return server.http.post(PATHS[client], json={**found["bodies"][number], **more}, headers=found["headers"])


def prompt_of(client, number):
    return f"{OFFERED[client].format('' if number else NEWEST[client])}{SEEN[client, number]}<assistant>"


@pytest.mark.parametrize(("client", "number"), list(SEEN))
def test_all_of_a_body_is_taken_and_the_model_sees_what_it_says(agents, client, number):
    ids = TOKENIZER(prompt_of(client, number))["input_ids"]
    streamed = sent(agents, client, number, **GREEDY, max_tokens=20)
    assert streamed.status_code == 200, streamed.text
    assert streamed.headers["x-lade-ignored"] == ", ".join(sorted(IGNORED[client, number].split()))
    answer = sent(agents, client, number, **GREEDY, max_tokens=20, stream=False).json()
    content = answer["output"][-1]["content"] if client == "codex" else answer["content"]
    assert content[-1]["text"] == text_of(plain(ids, max_new_tokens=20))
    used = answer["usage"]
    assert used["input_tokens"] + used.get("cache_read_input_tokens", 0) == len(ids)


SHORT = {**GREEDY, "stream": False, "logit_bias": {str(TOKENIZER('"')["input_ids"][0]): 100}}
"""Texts of toys in JSON have no end else."""


@pytest.mark.parametrize("client", list(PATHS))
def test_a_title_has_the_form_that_is_asked_for(server, client):
    answer = sent(server, client, 2, **SHORT)
    assert answer.status_code == 200, answer.text
    content = answer.json()["output"][-1]["content"] if client == "codex" else answer.json()["content"]
    assert json.loads(content[-1]["text"]).keys() == ({"title", "done"} if client == "codex" else {"title"})


def test_a_quota_is_asked_for_by_one_token(agents):
    assert sent(agents, "claude_code", 3, **GREEDY).json()["stop_reason"] == "max_tokens"


def test_older_names_of_a_form_and_forms_that_there_are_not(server):
    body = recorded("claude_code")["bodies"][2]
    config = body.pop("output_config")
    post = server.http.post
    older = post("/v1/messages", json={**body, **SHORT, "output_format": config["format"]})
    assert json.loads(older.json()["content"][0]["text"]).keys() == {"title"}
    for form, named in (({"type": "xml"}, "type: 'xml'"), ({"type": "json_schema"}, "schema: missing")):
        wrong = post("/v1/messages", json={**body, "output_config": {"format": form}})
        assert wrong.status_code == 400 and f"output_config.format.{named}" in wrong.json()["error"]["message"]


def as_codex_reads(events):
    """Items, deltas and usage, as far as its parser finds what it needs; what it does not know it leaves out."""
    items, text = [], ""
    for name, data in events:
        if name in ("response.output_item.added", "response.output_item.done"):
            item = data["item"]
            needed = {
                "message": {"role": str, "content": list},
                "reasoning": {"summary": list},
                "function_call": {"name": str, "arguments": str, "call_id": str},
            }[item["type"]]
            assert all(isinstance(item[member], kind) for member, kind in needed.items())
            items += [item] if name.endswith("done") else []
        elif name == "response.output_text.delta":
            text += data["delta"]
        elif name == "response.reasoning_text.delta":
            assert isinstance(data["delta"], str) and isinstance(data["content_index"], int)
    name, last = events[-1]
    assert (events[0][0], name) == ("response.created", "response.completed"), "else it asks again"
    used = last["response"]["usage"]
    counts = [used["input_tokens"], used["output_tokens"], used["total_tokens"]]
    counts += [used["input_tokens_details"]["cached_tokens"], used["output_tokens_details"]["reasoning_tokens"]]
    assert isinstance(last["response"]["id"], str) and all(isinstance(count, int) for count in counts)
    return items, text


SAID = [
    "<think>", "which", "?</think>", "I look.", '<tool_call>{"name": "mcp__tickets__find", "argu',
    'ments": {"query": "x"}}</tool_call>', '<tool_call>{"name": "exec_command", "argu',
    'ments": {"cmd": "ls"}}</tool_call>',
]  # fmt: skip
CALLED = '(which?)I look.!mcp__tickets__find{"query": "x"}!exec_command{"cmd": "ls"}|'
THEN_ENDS = {"min_tokens": len(SAID), "logit_bias": {"0": 100}, "max_tokens": 20, "lookahead": None}
"""Behind a token for each of the texts above the end is what the model says."""


def test_codex_is_told_of_calls_by_namespace_and_goes_on_with_their_results(agents, monkeypatch):
    asked = recorded("codex")["bodies"][0]
    with monkeypatch.context() as patch:
        scripted(patch, SAID)
        events = frames(agents, "/v1/responses", **{**asked, **THEN_ENDS})
    items, text = as_codex_reads(events)
    stages = [data["response"] for _, data in events if "response" in data]
    assert len({stage["created_at"] for stage in stages}) == 1 and abs(stages[0]["created_at"] - time.time()) < 60
    assert text == "I look." and [item["type"] for item in items[:2]] == ["reasoning", "message"]
    calls = [(call.get("namespace"), call["name"], json.loads(call["arguments"])) for call in items[2:]]
    assert calls == [("mcp__tickets", "find", {"query": "x"}), (None, "exec_command", {"cmd": "ls"})]
    done = [data["name"] for name, data in events if name == "response.function_call_arguments.done"]
    assert done == ["find", "exec_command"]
    offered = events[-1][1]["response"]["tools"]
    assert [tool["type"] for tool in offered] == ["function"] * 7 + ["namespace"] * 2
    assert offered[-1] == asked["tools"][-1]
    # what is sent back is what came, without ids, as stateless clients do
    history = [{name: value for name, value in item.items() if name != "id"} for item in items]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        for call, output in zip(items[2:], ('{"open": 2}', "a b"), strict=True)
    ]
    prompt = f'{prompt_of("codex", 0)}{CALLED}<tool>{{"open": 2}}|<tool>a b|<assistant>'
    body = {**asked, **GREEDY, "input": [*asked["input"], *history, *results], "max_output_tokens": 20}
    last = frames(agents, "/v1/responses", **body)[-1][1]["response"]
    ids, used = TOKENIZER(prompt)["input_ids"], last["usage"]
    assert last["output"][-1]["content"][0]["text"] == text_of(plain(ids, max_new_tokens=20))
    assert (used["input_tokens"], used["output_tokens"]) == (len(ids), 20)
    assert used["input_tokens_details"]["cached_tokens"] > 30, "the first turn is not read again"


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


def test_claude_code_is_told_of_calls_by_blocks_and_goes_on_with_their_results(agents, monkeypatch):
    found, path = recorded("claude_code"), PATHS["claude_code"]
    asked = {name: value for name, value in found["bodies"][0].items() if name != "stream"}
    client = anthropic.Anthropic(base_url=agents.url, api_key="none", max_retries=0, default_headers=found["headers"])
    with monkeypatch.context() as patch:
        scripted(patch, SAID)
        events = frames(agents, path, **{**asked, **THEN_ENDS})
        with client, client.beta.messages.stream(**asked, extra_body=THEN_ENDS) as stream:
            final = stream.get_final_message()
    members = {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert events[0][1]["message"].keys() == members
    blocks = blocks_of(events)
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.name for block in final.content[2:]] == ["mcp__tickets__find", "exec_command"]
    assert final.stop_reason == "tool_use" and final.content[2].input == {"query": "x"}
    listed, ephemeral = [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}], {"type": "ephemeral"}
    results = [
        {"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": listed, "is_error": False},
        {"type": "tool_result", "tool_use_id": blocks[3]["id"], "content": "no a", "is_error": True},
        {"type": "text", "text": "Go on.", "cache_control": ephemeral},
    ]
    talk = [*asked["messages"], {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    prompt = f"{prompt_of('claude_code', 0)}{CALLED}<tool>a b|<tool>no a|<user>Go on.|<assistant>"
    ids, body = TOKENIZER(prompt)["input_ids"], {**asked, **GREEDY, "messages": talk, "max_tokens": 20}
    events = frames(agents, path, **body)
    used = events[0][1]["message"]["usage"]
    assert blocks_of(events) == [{"type": "text", "text": text_of(plain(ids, max_new_tokens=20))}]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == len(ids)
    assert used["cache_read_input_tokens"] > 30, "the first turn is not read again"
    counted = agents.http.post("/v1/messages/count_tokens?beta=true", json={**asked, "messages": talk})
    assert counted.json() == {"input_tokens": len(ids)}


@pytest.mark.parametrize(
    ("item", "why"),
    [
        ({"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}}, "web_search"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "patch"}, "input[0].input"),
        (
            {"type": "message", "role": "user", "content": [
                {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "high"},
            ]},
            "takes no images",
        ),
        (
            {"type": "function_call_output", "call_id": "c", "output": [
                {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="},
            ]},
            "takes no images",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_of_a_codex_session_is_refused_by_name(agents, item, why):
    answer = sent(agents, "codex", 0, input=[item])
    assert answer.status_code == 400 and why in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("block", "why"),
    [
        ({"type": "image", "source": {"media_type": "image/png", "data": "iVBORw0KGgo="}}, "takes no images"),
        ({"type": "document", "source": {"media_type": "application/pdf", "data": "JVBE"}}, "send the text"),
    ],
)
def test_what_cannot_be_shown_to_claude_code_is_refused_by_name(agents, block, why):
    block = {**block, "source": {"type": "base64", **block["source"]}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [block]}
    for content in ([block], [result]):
        answer = sent(agents, "claude_code", 0, messages=[{"role": "user", "content": content}])
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error") and why in error["message"]


def test_a_response_that_waits_says_so_by_events():
    passes, body = Passes(), {"input": "x", "stream": True, "max_output_tokens": 4, "ignore_eos": True}
    with running(slow_served(0.01, wait=passes), ping_s=0.05) as server:  # noqa: SIM117 - the stream is the server's
        with server.http.stream("POST", "/v1/responses", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            waiting = [next(lines) for _ in range(8)]
            passes.let_all()
            rest = list(lines)
    names = [line.removeprefix("event: ") for line in [*waiting, *rest] if line.startswith("event: ")]
    assert names[:4] == ["response.created", *["response.in_progress"] * 3] and names.count("response.created") == 1
    numbers = [json.loads(line[6:])["sequence_number"] for line in [*waiting, *rest] if line.startswith("data: ")]
    assert numbers == list(range(len(names))) and names[-1] == "response.incomplete"
