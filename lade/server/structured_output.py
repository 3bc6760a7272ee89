"""Structured output: response formats and tool calls as grammars.

`requested_grammar` reads the format of a request, `requested_calls` its tools; `message_grammar` combines both with the
markup of the model's chat template.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any, NamedTuple

from transformers import LogitsProcessor

from lade.errors import InputError, MissingExtraError
from lade.grammar import Grammar, GrammarError
from lade.server.errors import INVALID_SCHEMA, invalid, overloaded, unsupported
from lade.server.schemas import BaseRequest, ChatRequest, StructuredOutputs
from lade.server.served_model import ServedModel
from lade.server.settings import LONGEST_SCHEMA, LONGEST_TOOLS, SLOWEST_TOOLS
from lade.serving.request import GrammarCompiler

RESPONSE_FORMAT = "response_format"
_ANNOTATIONS = frozenset(["description", "title", "$comment", "$schema"])
_VALUES = frozenset(["const", "enum", "default", "examples"])
"""Schema keywords whose values are not schemas."""


class ServedGrammars:
    """The compiler of requests' grammars, with errors in the API's form; there may be none for a tokenizer."""

    def __init__(self, model: ServedModel) -> None:
        self._unavailable = ""  # the reason, if grammars are
        self._compiler: GrammarCompiler | None = None
        try:
            self._compiler = GrammarCompiler(model.tokenizer, model.ends)
        except (MissingExtraError, InputError) as problem:
            self._unavailable = str(problem)

    @property
    def available(self) -> bool:
        """True if grammars can be used with this tokenizer."""
        return self._compiler is not None

    def compiler(self, param: str) -> GrammarCompiler:
        """Return the compiler; raise `ApiError` if there is none."""
        if self._compiler is None:
            raise unsupported(param, self._unavailable)
        return self._compiler

    def processor(self, grammar: Grammar, param: str, budget: Any = None) -> LogitsProcessor:
        """Return the processor of one answer, with its request's mask budget; raise `ApiError` if there is none."""
        try:
            return self.compiler(param).processor(grammar, budget)
        except OSError as problem:
            raise overloaded(f"{param}: {problem}", "grammar_not_tried") from problem
        except InputError as problem:
            raise invalid(param, str(problem), INVALID_SCHEMA) from problem

    def close(self) -> None:
        """Stop the trial process."""
        if self._compiler is not None:
            self._compiler.close()


def requested_grammar(body: BaseRequest, field: str = RESPONSE_FORMAT) -> tuple[Grammar, str] | None:
    """Return a request's grammar and the field that sets it, or None; raise `ApiError` for a wrong one, or two."""
    made = _structured(body.structured_outputs)
    if isinstance(body, ChatRequest):
        made += _response_format(body.response_format, field)
    if not made:
        return None
    (make, given, param), *more = made
    if more:
        raise invalid(more[0][2], f"contradicts {param}: leave out one of them")
    if length_of(given) > LONGEST_SCHEMA:
        raise invalid(param, f"more than {LONGEST_SCHEMA} characters: shorten it", INVALID_SCHEMA)
    try:
        return make(given), param
    except InputError as problem:
        raise invalid(param, str(problem), INVALID_SCHEMA) from problem
    except MissingExtraError as problem:
        raise unsupported(param, str(problem)) from problem


_Constraints = list[tuple[Callable[[Any], Grammar], Any, str]]
"""What makes a grammar, of which value, and the field that has it."""


def _structured(given: StructuredOutputs | None) -> _Constraints:
    if given is None:
        return []
    where, flexible = "structured_outputs", given.whitespace
    possible: _Constraints = [
        (lambda schema: schema_of(schema, flexible), given.json_schema, f"{where}.json"),
        (lambda _: Grammar.json_object(whitespace=flexible), "" if given.json_object else None, f"{where}.json_object"),
        (Grammar.regex, given.regex, f"{where}.regex"),
        (Grammar.choice, given.choice, f"{where}.choice"),
        (Grammar.lark, given.grammar, f"{where}.grammar"),
    ]
    constraints = [each for each in possible if each[1] is not None]
    if not constraints:
        raise invalid(where, "empty: give json, json_object, regex, choice or grammar")
    return constraints


def _response_format(given: dict[str, Any] | None, field: str) -> _Constraints:
    """Read OpenAI's field, whose name depends on the API, also in the layout of older servers."""
    if given is None:
        return []
    kind = given.get("type")
    if kind is None:
        raise invalid(f"{field}.type", "missing: give json_schema, json_object or text")
    if kind == "text":
        return []
    if kind == "json_object" and given.get("schema") is None:
        return [(lambda _: Grammar.json_object(), "", field)]
    if kind not in ("json_object", "json_schema"):
        why = f"{str(kind)[:40]!r} is not supported: give json_schema, json_object or text"
        raise unsupported(f"{field}.type", why)
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else given.get("schema")
    param = f"{field}.json_schema.schema" if field == RESPONSE_FORMAT and kind == "json_schema" else f"{field}.schema"
    if schema is None:
        raise invalid(param, "missing: give a JSON schema")
    return [(schema_of, schema, param)]


def schema_of(schema: Any, whitespace: bool = False) -> Grammar:
    """Return the grammar of a JSON schema; raise `InputError` for an invalid one."""
    if isinstance(schema, bool | int | float | list):
        raise InputError("a JSON schema must be an object")
    return Grammar.json_schema(schema, whitespace=whitespace)


def length_of(given: Any) -> int:
    """Return the length of a text, or of JSON without annotations; `sys.maxsize` if nested too deeply."""
    try:
        return len(given if isinstance(given, str) else json.dumps(_without_annotations(given)))
    except RecursionError:
        return sys.maxsize


def _without_annotations(schema: Any) -> Any:
    """Return a schema without annotations, which make up most of what coding agents send and cost nothing."""
    if isinstance(schema, list):
        return [_without_annotations(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: part for name, part in schema.items() if not (name in _ANNOTATIONS and isinstance(part, str))}
    return {name: part if name in _VALUES else _without_annotations(part) for name, part in kept.items()}


def check_ends(body: BaseRequest, param: str) -> None:
    """Raise `ApiError` for options that would continue an answer beyond the end of its grammar."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise invalid(name, f"not available with {param}, which determines the end: leave it out")


_ANYTHING = "/(?s:.*)/"
_NAME = re.compile(r"[\w.-]{1,128}")
_REASONING_TAGS, _CALL_TAGS = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")


class CallableTool(NamedTuple):
    """A tool that may be called: its name, and the grammar of its arguments."""

    name: str
    arguments: Grammar


class Calls(NamedTuple):
    """Tool calls that an answer may contain."""

    tools: Sequence[CallableTool]
    forced: bool  # at least one call is required
    several: bool  # more than one call is allowed


def requested_calls(body: ChatRequest, vocabulary: GrammarCompiler) -> Calls | None:
    """Return the tool calls that a request allows; None if unconstrained.

    A tool whose schema cannot be compiled accepts any object, unless it is strict.

    Raises:
        ApiError: an unknown tool is forced, a strict tool's schema cannot be compiled, or compilation takes too long.
    """
    tools, choice = body.tools or [], body.tool_choice
    forced = choice not in (None, "auto", "none")
    names = [_function(tool).get("name") for tool in tools]
    nameless = [number for number, name in enumerate(names) if not (isinstance(name, str) and _NAME.fullmatch(name))]
    if choice == "none" or not (forced or (tools and not nameless)):
        return None
    if not tools:
        raise invalid("tool_choice", "no tools to call: give tools")
    if nameless:
        raise invalid(f"tools[{nameless[0]}].function.name", "give a name of letters, digits, - and _")
    named = _named(choice)
    if choice not in (None, "auto", "required") and named not in names:
        raise invalid("tool_choice", 'tool_choice: give "auto", "none", "required", or the name of a tool')
    numbers = range(len(tools)) if named is None else [names.index(named)]
    made, left, begun = list[CallableTool](), LONGEST_TOOLS, thread_time()
    for number in numbers:
        length, place = length_of(_schema(tools[number])), f"tools[{number}].function"
        arguments = _arguments_grammar(tools[number], place, vocabulary, length, left)
        made.append(CallableTool(str(names[number]), arguments))
        left -= length if length <= min(left, LONGEST_SCHEMA) else 0
        if thread_time() - begun > SLOWEST_TOOLS:
            raise invalid("tools", f"their schemas take more than {SLOWEST_TOOLS:g} s to compile", INVALID_SCHEMA)
    return Calls(made, forced, body.parallel_tool_calls is not False and named is None)


def _named(choice: Any) -> str | None:
    """Return the function that a tool choice names, or None."""
    name = _function(choice).get("name") if isinstance(choice, dict) and choice.get("type") == "function" else None
    return name if isinstance(name, str) else None


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    inner = tool.get("function", tool)
    return inner if isinstance(inner, dict) else {}


def _schema(tool: dict[str, Any]) -> Any:
    return _function(tool).get("parameters") or {"type": "object"}


def _arguments_grammar(
    tool: dict[str, Any], place: str, vocabulary: GrammarCompiler, length: int, left: int
) -> Grammar:
    """Return the grammar of a call's arguments; `left` is what remains of the request's limit on schema lengths."""
    try:
        if length > LONGEST_SCHEMA:
            raise InputError(f"more than {LONGEST_SCHEMA} characters")
        if length > left:
            raise InputError(f"with the schemas of the tools before it, more than {LONGEST_TOOLS} characters")
        made = schema_of(_schema(tool))
        vocabulary.compiled(made.source)
    except InputError as problem:
        if _function(tool).get("strict") or isinstance(problem, GrammarError):
            raise invalid(f"{place}.parameters", str(problem), INVALID_SCHEMA) from problem
        return Grammar.json_object()
    return made


def message_grammar(
    template: str, prompt: str, form: Grammar | None, calls: Calls | None, vocabulary: GrammarCompiler
) -> Grammar | None:
    """Return the grammar of the model's whole output after a rendered prompt; None if unconstrained.

    The chat template shows the markup. Without a form answers are any text, and without calls these are unconstrained.

    Raises:
        ApiError: a call is forced in an unknown markup.
    """
    calls_are_json = _CALL_TAGS[0] in template and not re.search(r"<function=|<arg_key>|<parameter", template)
    if calls is not None and not calls_are_json:
        if calls.forced:
            why = 'grammars do not support this model\'s tool call markup: give "auto" or "none"'
            raise unsupported("tool_choice", why)
        calls = None
    if form is None and calls is None:
        return None
    rules, parts = list[str](), dict[str, Grammar]()
    thoughts = _reasoning_rule(template, prompt, rules, vocabulary)
    body = _body(form, calls, rules, parts, vocabulary)
    if form is not None and not rules:
        return form
    return Grammar.nested("\n".join([f"start: {thoughts}({body})", *rules]), parts)


def _reasoning_rule(template: str, prompt: str, rules: list[str], vocabulary: GrammarCompiler) -> str:
    """Return the rule of reasoning before the answer, if the prompt has opened it or the model may."""
    opening, closing = _REASONING_TAGS
    before = prompt.rstrip()
    if opening not in template or before.endswith(closing):
        return ""
    rules += [*_until("thoughts", closing, vocabulary), "gap: /\\n{0,2}/"]
    return "thoughts gap " if before.endswith(opening) else f"({_mark(opening, vocabulary)} thoughts gap)? "


def _body(
    form: Grammar | None,
    calls: Calls | None,
    rules: list[str],
    parts: dict[str, Grammar],
    vocabulary: GrammarCompiler,
) -> str:
    if form is not None:
        parts["form"] = form
    if calls is None:
        return "@form"
    opening, closing = _CALL_TAGS
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


def _mark(text: str, vocabulary: GrammarCompiler) -> str:
    """Return a tag as a special token, or as text if it is none."""
    special = vocabulary.special_id(text)
    return json.dumps(text) if special is None else f"<[{special}]>"


def _until(name: str, mark: str, vocabulary: GrammarCompiler) -> list[str]:
    """Return the rule for any text up to a tag, and the tag."""
    if vocabulary.special_id(mark) is None:
        return [f"{name}[suffix={json.dumps(mark)}]: {_ANYTHING}"]
    return [f"{name}: {_ANYTHING} {_mark(mark, vocabulary)}"]


def _without(name: str, mark: str, vocabulary: GrammarCompiler) -> list[str]:
    """Return the rule for any text without the tag."""
    if vocabulary.special_id(mark) is not None:
        return [f"{name}: {_ANYTHING}"]
    pattern = re.escape(mark).replace("/", "\\/")
    return [f"{name}: UNMARKED", f"UNMARKED: {_ANYTHING} & ~/(?s:.*){pattern}(?s:.*)/"]
