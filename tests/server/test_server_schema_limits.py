"""How long schemas may be: each by itself, without what it says to readers; and those of many tools together."""

import json
from pathlib import Path

import pytest
from served import byte_tokenizer

from lade.backends.grammar.compiled import vocabulary_of_tokenizer
from lade.grammar import Grammar
from lade.server.errors import ApiError
from lade.server.messages import MessagesRequest
from lade.server.messages import as_chat as from_blocks
from lade.server.responses import ResponsesRequest
from lade.server.responses import as_chat as from_items
from lade.server.schemas import ChatRequest
from lade.server.settings import LONGEST_SCHEMA, LONGEST_TOOLS, MAX_TOOLS
from lade.server.structured_output import length_of, requested_calls, requested_grammar

BODIES = Path(__file__).parent / "bodies"
VOCABULARY = vocabulary_of_tokenizer(byte_tokenizer())
MESSAGES = [{"role": "user", "content": "hello"}]


def schema(length=0, notes=0):
    """One of so many characters, and so many more of notes."""
    made = {"type": "object", "properties": {"a": {"enum": [""]}}, "description": "x" * notes}
    made["properties"]["a"]["enum"][0] = "x" * max(0, length - length_of(made))
    return made


def tool(number, parameters, **more):
    function = {"name": f"tool_{number}", "description": "y" * 5000, "parameters": parameters, **more}
    return {"type": "function", "function": function}


def calls_of(tools, choice="auto"):
    asked = {"messages": MESSAGES, "tools": tools, "tool_choice": choice}
    return requested_calls(ChatRequest.model_validate(asked), VOCABULARY)


def free(calls):
    return [call.arguments == Grammar.json_object() for call in calls.tools]


def test_a_schema_that_is_too_long_is_refused_and_notes_do_not_count():
    noted = {
        "$schema": "x", "title": "x", "$comment": "x", "description": "x", "type": "object",
        "properties": {"title": {"description": "x", "anyOf": [{"title": "x", "enum": ["b"]}]}},
        "default": {"title": "c"},
    }  # fmt: skip
    bare = {"type": "object", "properties": {"title": {"anyOf": [{"enum": ["b"]}]}}, "default": {"title": "c"}}
    assert length_of(noted) == len(json.dumps(bare)) and length_of("a text") == 6

    def asked(schema):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return requested_grammar(ChatRequest.model_validate({"messages": MESSAGES, "response_format": form}))

    assert asked(schema(100, notes=2 * LONGEST_SCHEMA)) is not None
    with pytest.raises(ApiError, match=str(LONGEST_SCHEMA)):
        asked(schema(LONGEST_SCHEMA + 1))


def test_calls_follow_the_schemas_of_as_many_tools_as_agents_have():
    tools = [tool(number, schema(150, notes=2000)) for number in range(MAX_TOOLS - 100)]
    assert len(json.dumps(tools)) > 2 * 10**6 and not any(free(calls_of(tools)))


def test_calls_follow_every_schema_of_codex_and_claude_code():
    for client, kind, as_chat in (
        ("codex", ResponsesRequest, from_items),
        ("claude_code", MessagesRequest, from_blocks),
    ):
        body = json.loads((BODIES / f"{client}.json").read_text(encoding="utf-8"))["bodies"][0]
        calls = requested_calls(as_chat(kind.model_validate(body)), VOCABULARY)
        odd = [call.name for call in calls.tools if call.arguments == Grammar.json_object()]
        assert len(calls.tools) > 10 and not odd


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_limit_is_each_schemas_own_and_many_long_ones_end_somewhere(choice):
    lengths = [LONGEST_SCHEMA, LONGEST_SCHEMA + 1, 100, LONGEST_SCHEMA, LONGEST_TOOLS - LONGEST_SCHEMA - 100, 100]
    tools = [tool(number, schema(length)) for number, length in enumerate(lengths)]
    assert free(calls_of(tools, choice)) == [False, True, False, True, False, True]
    named = {"type": "function", "function": {"name": "tool_5"}}
    assert free(calls_of(tools, named)) == [False], "the others are not read"
    tools[3] = tool(3, schema(LONGEST_SCHEMA), strict=True)
    with pytest.raises(ApiError, match="before it") as raised:
        calls_of(tools, choice)
    assert raised.value.param == "tools[3].function.parameters"
