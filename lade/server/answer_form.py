"""What an answer may be, by the fields of a request that say it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from lade.errors import InputError, MissingExtraError
from lade.hf.grammar.compiled import Vocabulary, vocabulary_of_tokenizer
from lade.hf.grammar.grammar import Grammar, processor_of
from lade.hf.grammar.matcher import Budget
from lade.hf.grammar.processor import GrammarProcessor
from lade.hf.grammar.trial import GrammarTrial
from lade.server.errors import INVALID_SCHEMA, invalid, unsupported
from lade.server.schemas import ChatRequest, Decoding, StructuredOutputs
from lade.server.served_model import ServedModel
from lade.server.settings import LONGEST_SCHEMA

_ANY_TEXT = ("text", None)
_NOTES = frozenset(["description", "title", "$comment", "$schema"])
_VALUES = frozenset(["const", "enum", "default", "examples"])
"""Members of a schema that are no schemas."""


class FormatNames(NamedTuple):
    """What clients of an API call `ChatRequest.response_format`, and the schema in it."""

    whole: str = "response_format"
    schema: str = "response_format.json_schema.schema"


CHAT_NAMES = FormatNames()


class Forms:
    """Makes processors of the grammars that requests ask for.

    Args:
        model: whose answers follow them. What its tokenizer takes to be prepared is done here, once.
    """

    def __init__(self, model: ServedModel) -> None:
        self._missing: MissingExtraError | None = None
        self._unfit: InputError | None = None
        self._vocabulary: Vocabulary | None = None
        self._trial: GrammarTrial | None = None
        try:
            vocabulary = vocabulary_of_tokenizer(model.tokenizer, model.ends)
            self._trial = GrammarTrial(vocabulary.specials)
            self._vocabulary = vocabulary.tried_by(self._trial)
        except MissingExtraError as problem:
            self._missing = problem
        except InputError as problem:
            self._unfit = problem

    @property
    def available(self) -> bool:
        """Whether there can be any."""
        return self._vocabulary is not None

    def vocabulary(self, param: str) -> Vocabulary:
        """Of the model's tokenizer.

        Raises:
            ApiError: the field `param` cannot be served.
        """
        if self._vocabulary is None:
            raise unsupported(param, f"{param}: {self._missing or self._unfit}")
        return self._vocabulary

    def require(self, grammar: Grammar, param: str) -> None:
        """Raise `ApiError` for a grammar that cannot be used."""
        self.processor(grammar, param)

    def processor(self, grammar: Grammar, param: str, budget: Budget | None = None) -> GrammarProcessor:
        """The processor of one answer, with the budget of all answers to its request; raises like `require`."""
        try:
            return processor_of([grammar], self.vocabulary(param), budget)
        except InputError as problem:
            raise invalid(param, f"{param}: {problem}", INVALID_SCHEMA) from problem

    def close(self) -> None:
        """End what they are tried by."""
        if self._trial is not None:
            self._trial.close()


def asked_form(body: Decoding, names: FormatNames = CHAT_NAMES) -> tuple[Grammar, str] | None:
    """The grammar that a request asks for, and by which field; None where the answer may be any text.

    Args:
        body: the request.
        names: of fields, for errors.

    Raises:
        ApiError: what it says is no grammar, too long, or contradicts itself.
    """
    made = [*_structured(body.structured_outputs), *_guided(body)]
    if isinstance(body, ChatRequest):
        made += _response_format(body.response_format, names)
    if not made:
        return None
    (make, given, param), *more = made
    if more:
        raise invalid(more[0][2], f"{more[0][2]}: {param} says what the answer may be: leave out one of them")
    _check_length(given, param)
    try:
        return make(given), param
    except InputError as problem:
        raise invalid(param, f"{param}: {problem}", INVALID_SCHEMA) from problem
    except MissingExtraError as problem:
        raise unsupported(param, f"{param}: {problem}") from problem


_Asked = list[tuple[Callable[[Any], Grammar], Any, str]]


def _structured(given: StructuredOutputs | None) -> _Asked:
    if given is None:
        return []
    where, flexible = "structured_outputs", given.whitespace
    asked: _Asked = []
    if given.json_schema is not None:
        asked.append((lambda schema: schema_of(schema, flexible), given.json_schema, f"{where}.json"))
    if given.json_object:
        asked.append((lambda _: Grammar.json_object(whitespace=flexible), "", f"{where}.json_object"))
    asked += _texts(where + ".", regex=given.regex, choice=given.choice, grammar=given.grammar)
    if not asked:
        raise invalid(where, f"{where}: it says nothing: give json, json_object, regex, choice or grammar")
    return asked


def _guided(body: Decoding) -> _Asked:
    """The older names of the same."""
    asked: _Asked = []
    if body.guided_json is not None:
        asked.append((schema_of, body.guided_json, "guided_json"))
    return asked + _texts("guided_", regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar)


def _texts(prefix: str, *, regex: str | None, choice: list[str] | None, grammar: str | None) -> _Asked:
    several = ((Grammar.regex, regex, "regex"), (Grammar.choice, choice, "choice"), (Grammar.lark, grammar, "grammar"))
    return [(make, given, prefix + name) for make, given, name in several if given is not None]


def _response_format(given: dict[str, Any] | None, names: FormatNames) -> _Asked:
    """OpenAI's field; the schema may also stand where older servers want it."""
    kind = (given or {}).get("type")
    if given is None or kind in _ANY_TEXT:
        return []
    if kind == "json_object" and given.get("schema") is None:
        return [(lambda _: Grammar.json_object(), "", names.whole)]
    if kind not in ("json_object", "json_schema"):
        why = f"{names.whole}: {str(kind)[:40]!r} is not served: give json_schema, json_object or text"
        raise unsupported(f"{names.whole}.type", why)
    inner = given.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else given.get("schema")
    param = names.schema if kind == "json_schema" else f"{names.whole}.schema"
    if schema is None:
        raise invalid(param, f"{param}: there is none: give a JSON schema")
    return [(schema_of, schema, param)]


def schema_of(schema: Any, whitespace: bool = False) -> Grammar:
    """The grammar of a schema as it stands in a request.

    Raises:
        InputError: it is no schema.
    """
    if isinstance(schema, bool | int | float | list):
        raise InputError("a JSON schema is an object: give one")
    return Grammar.json_schema(schema, whitespace=whitespace)


def _check_length(given: Any, param: str) -> None:
    if length_of(given) > LONGEST_SCHEMA:
        raise invalid(
            param, f"{param}: it has more than {LONGEST_SCHEMA} characters: give a shorter one", INVALID_SCHEMA
        )


def length_of(given: Any) -> int:
    """Characters of a text, or of JSON without its notes; more than any that is served where it is too deep."""
    try:
        return len(given if isinstance(given, str) else json.dumps(_without_notes(given)))
    except RecursionError:
        return sys.maxsize


def _without_notes(schema: Any) -> Any:
    """A schema without what is only for its readers, which is most of what coding agents send and takes no time."""
    if isinstance(schema, list):
        return [_without_notes(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: part for name, part in schema.items() if not (name in _NOTES and isinstance(part, str))}
    return {name: part if name in _VALUES else _without_notes(part) for name, part in kept.items()}


def refuse_other_ends(body: Decoding, param: str) -> None:
    """Raise `ApiError` where a request wants an answer to go on behind the end of its grammar."""
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise invalid(name, f"{name}: the answer ends where {param} says: leave it out")
