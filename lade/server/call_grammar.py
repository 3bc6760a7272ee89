"""The grammar of a whole message: thoughts, calls of tools, and an answer of a certain form, in a model's markup."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from time import thread_time
from typing import Any

from lade.errors import InputError
from lade.hf.grammar.compiled import SlowGrammarError, Vocabulary
from lade.hf.grammar.grammar import Grammar
from lade.server.answer_form import length_of, schema_of
from lade.server.errors import INVALID_SCHEMA, invalid, unsupported
from lade.server.schemas import ChatRequest
from lade.server.settings import LONGEST_SCHEMA, LONGEST_TOOLS, SLOWEST_TOOLS

_ANYTHING = "/(?s:.*)/"
_NAME = re.compile(r"[\w.-]{1,128}")
_THOUGHTS, _CALLS = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class Call:
    """A tool that may be called.

    Attributes:
        name: its name.
        arguments: what they may be.
    """

    name: str
    arguments: Grammar


@dataclass(frozen=True)
class Calls:
    """Which tools an answer may call.

    Attributes:
        tools: those.
        forced: whether it has to call one.
        several: whether it may call more than one.
    """

    tools: Sequence[Call]
    forced: bool
    several: bool


def asked_calls(body: ChatRequest, vocabulary: Vocabulary) -> Calls | None:
    """What a request says about calls; None where they are not to be restricted.

    A tool whose arguments cannot be described may be called with any object, unless it is to be strict.

    Raises:
        ApiError: a call is forced of a tool that there is not; a strict tool cannot be described; or a schema takes too
            long to compile.
    """
    tools, choice = body.tools or [], body.tool_choice
    forced = choice not in (None, "auto", "none")
    names = [_function(tool).get("name") for tool in tools]
    nameless = [number for number, name in enumerate(names) if not (isinstance(name, str) and _NAME.fullmatch(name))]
    if choice == "none" or not (forced or (tools and not nameless)):
        return None
    if not tools:
        raise invalid("tool_choice", "tool_choice: there are no tools to call: give tools")
    if nameless:
        param = f"tools[{nameless[0]}].function.name"
        raise invalid(param, f"{param}: a function needs a name, of letters, digits, - and _")
    named = _named(choice)
    if choice not in (None, "auto", "required") and named not in names:
        raise invalid("tool_choice", 'tool_choice: give "auto", "none", "required", or the name of one of tools')
    numbers = range(len(tools)) if named is None else [names.index(named)]
    made, left, begun = list[Call](), LONGEST_TOOLS, thread_time()
    for number in numbers:
        length = length_of(_schema(tools[number]))
        made.append(_call(tools[number], f"tools[{number}].function", vocabulary, length, left))
        left -= length if length <= min(left, LONGEST_SCHEMA) else 0
        if thread_time() - begun > SLOWEST_TOOLS:
            raise invalid(
                "tools", f"tools: their schemas take more than {SLOWEST_TOOLS:g} s to compile", INVALID_SCHEMA
            )
    return Calls(made, forced, body.parallel_tool_calls is not False and named is None)


def _named(choice: Any) -> str | None:
    """The function that a choice names, in one of the forms of OpenAI's API."""
    name = _function(choice).get("name") if isinstance(choice, dict) and choice.get("type") == "function" else None
    return name if isinstance(name, str) else None


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    inner = tool.get("function", tool)
    return inner if isinstance(inner, dict) else {}


def _schema(tool: dict[str, Any]) -> Any:
    return _function(tool).get("parameters") or {"type": "object"}


def _call(tool: dict[str, Any], place: str, vocabulary: Vocabulary, length: int, left: int) -> Call:
    """One of them; `length` is its schema's, and `left` how long those of a request may still be together."""
    function = _function(tool)
    try:
        if length > LONGEST_SCHEMA:
            raise InputError(f"it has more than {LONGEST_SCHEMA} characters")
        if length > left:
            raise InputError(f"with the schemas of the tools before it, it has more than {LONGEST_TOOLS} characters")
        made = schema_of(_schema(tool))
        vocabulary.compiled(made.source)
    except InputError as problem:
        if function.get("strict") or isinstance(problem, SlowGrammarError):
            raise invalid(f"{place}.parameters", f"{place}.parameters: {problem}", INVALID_SCHEMA) from problem
        made = Grammar.json_object()
    return Call(str(function["name"]), made)


def message_grammar(
    template: str, prompt: str, form: Grammar | None, calls: Calls | None, vocabulary: Vocabulary
) -> Grammar | None:
    """What the model may say after a prompt; None for anything.

    Args:
        template: the chat template, whose marks tell the markup.
        prompt: as the model sees it.
        form: what the answer may be.
        calls: which tools may be called.
        vocabulary: has the marks that are special tokens.

    Raises:
        ApiError: a call is forced, in a markup that is not known.
    """
    if calls is not None and not _has_calls(template):
        if calls.forced:
            why = 'tool_choice: this model\'s calls have a markup that cannot be forced: give "auto" or "none"'
            raise unsupported("tool_choice", why)
        calls = None
    if form is None and calls is None:
        return None
    rules, parts = list[str](), dict[str, Grammar]()
    thoughts = _thoughts(template, prompt, rules, vocabulary)
    body = _body(form, calls, rules, parts, vocabulary)
    if form is not None and not rules:
        return form
    return Grammar.nested("\n".join([f"start: {thoughts}({body})", *rules]), parts)


def _has_calls(template: str) -> bool:
    """Whether calls are JSON between marks."""
    return _CALLS[0] in template and not re.search(r"<function=|<arg_key>|<parameter", template)


def _thoughts(template: str, prompt: str, rules: list[str], vocabulary: Vocabulary) -> str:
    """What stands before the answer: thoughts where the prompt has begun them, or where the model may."""
    opening, closing = _THOUGHTS
    before = prompt.rstrip()
    if opening not in template or before.endswith(closing):
        return ""
    rules += [*_until("thoughts", closing, vocabulary), "gap: /\\n{0,2}/"]
    return "thoughts gap " if before.endswith(opening) else f"({_mark(opening, vocabulary)} thoughts gap)? "


def _body(
    form: Grammar | None, calls: Calls | None, rules: list[str], parts: dict[str, Grammar], vocabulary: Vocabulary
) -> str:
    if form is not None:
        parts["form"] = form
    if calls is None:
        return "@form"
    opening, closing = _CALLS
    for number, tool in enumerate(calls.tools):
        parts[f"tool_{number}"] = tool.arguments
        begin = json.dumps(f'\n{{"name": "{tool.name}", "arguments": ')
        rules.append(f'call_{number}: {begin} @tool_{number} "}}\\n" {_mark(closing, vocabulary)}')
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(calls.tools))))
    one = f"{_mark(opening, vocabulary)} call"
    only_calls = f'{one} ("\\n" {one})*' if calls.several else one
    if calls.forced:
        return only_calls
    if form is not None:
        return f"{only_calls} | @form"
    rules += [*_until("before", opening, vocabulary), *_without("after", opening, vocabulary)]
    return f"(before call){'*' if calls.several else '?'} after"


def _mark(text: str, vocabulary: Vocabulary) -> str:
    """A mark, which is a special token in some tokenizers, and text in others."""
    special = vocabulary.special_id(text)
    return json.dumps(text) if special is None else f"<[{special}]>"


def _until(name: str, mark: str, vocabulary: Vocabulary) -> list[str]:
    """Anything up to a mark, and the mark."""
    if vocabulary.special_id(mark) is None:
        return [f"{name}[suffix={json.dumps(mark)}]: {_ANYTHING}"]
    return [f"{name}: {_ANYTHING} {_mark(mark, vocabulary)}"]


def _without(name: str, mark: str, vocabulary: Vocabulary) -> list[str]:
    """Anything that has no such mark in it."""
    if vocabulary.special_id(mark) is not None:
        return [f"{name}: {_ANYTHING}"]
    pattern = re.escape(mark).replace("/", "\\/")
    return [f"{name}: UNMARKED", f"UNMARKED: {_ANYTHING} & ~/(?s:.*){pattern}(?s:.*)/"]
