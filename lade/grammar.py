"""`lade.Grammar`: constrain answers by a JSON schema, a regular expression, choices or a Lark grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from lade.errors import InputError, MissingExtraError
from lade.model.registry import Role

if TYPE_CHECKING:
    from transformers import LogitsProcessor, PreTrainedModel

    from lade.decoding.drafting.drafter import Constraint
    from lade.model.prepared import Prepared

_LONGEST_REASON = 300
_VALUES = frozenset(["const", "enum", "default", "examples"])
"""Keywords of a JSON schema whose values are data, not schemas."""
_NAMED = frozenset(["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"])
"""Keywords whose values are schemas by names of the author's."""
_FORMATS = frozenset("date date-time duration email hostname ipv4 ipv6 time unknown uri uuid".split())  # noqa: SIM905
"""Formats that llguidance knows."""
_BOUNDS = frozenset(["exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"])
_LARGEST = 2**63


@dataclass(frozen=True)
class Grammar:
    """A constraint on answers; construct one with the class methods below.

    >>> grammar = lade.Grammar.json_schema({"type": "object", "properties": {"name": {"type": "string"}}})
    >>> ids = lade.generate(model, **inputs, max_new_tokens=100, grammar=grammar, tokenizer=tokenizer)

    An answer that ends with EOS is complete; one that is cut off by its length limit may not be.

    Attributes:
        source: the grammar in llguidance's own format.
    """

    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | type, *, whitespace: bool = False) -> Grammar:
        """Return a grammar for JSON that matches a schema, with members in the schema's order.

        Args:
            schema: a JSON schema, as an object or as JSON text, or a pydantic model.
            whitespace: allow whitespace between JSON tokens. Without it more tokens are forced, which saves steps.

        Raises:
            InputError: it is not a schema. Unsupported keywords are found when the grammar is compiled for a tokenizer.
            MissingExtraError: llguidance is not installed.
        """
        of_pydantic_model = getattr(schema, "model_json_schema", None)
        given = of_pydantic_model() if of_pydantic_model is not None else schema
        try:
            parsed = json.loads(given) if isinstance(given, str) else given
            text = json.dumps(_understood(parsed), allow_nan=False)
            return cls(_llguidance().grammar_from_json_schema(text, overrides={"whitespace_flexible": whitespace}))
        except (TypeError, ValueError, RecursionError) as problem:
            raise InputError(f"the schema cannot be used: {shortened(str(problem))}") from problem

    @classmethod
    def json_object(cls, *, whitespace: bool = False) -> Grammar:
        """Return a grammar for any JSON object; see `json_schema`."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return a grammar for text that a regular expression matches in full, in the syntax of Rust's regex crate.

        Raises:
            InputError: the pattern is not a text. Unsupported syntax is found when it is compiled for a tokenizer.
            MissingExtraError: llguidance is not installed.
        """
        return cls(_llguidance().grammar_from_regex(_text(pattern, "pattern")))

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Grammar:
        """Return a grammar for exactly one of several texts.

        Raises:
            InputError: `texts` is empty, or one of them is empty or not a text.
        """
        several = [] if isinstance(texts, str) else list(texts)
        if not several or not all(isinstance(text, str) and text for text in several):
            raise InputError(f"choice={texts!r:.60} is not valid: give a list of texts, none of them empty")
        alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in several)
        return cls.lark(f"start: TEXT\nTEXT: {alternatives}")  # a terminal: 2,000 rules exceed llguidance's limit

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return a context-free grammar in llguidance's dialect of Lark, whose first rule is `start`."""
        return cls(_llguidance().grammar_from_lark(_text(grammar, "grammar")))

    @classmethod
    def nested(cls, lark: str, parts: Mapping[str, Grammar]) -> Grammar:
        """Return a Lark grammar that embeds other grammars, each referred to as `@name`."""
        listed = [{"name": name, **part._definition} for name, part in parts.items()]
        return cls(json.dumps({"grammars": [{"name": "nesting", "lark_grammar": lark}, *listed]}, ensure_ascii=False))

    @property
    def _definition(self) -> dict[str, Any]:
        """The grammar as a part of another one; nested grammars cannot be nested again."""
        if not self.source.startswith("{"):
            return {"lark_grammar": self.source}
        (found,) = json.loads(self.source)["grammars"]
        return {kind: value for kind, value in found.items() if kind != "name" and value is not None}

    def processor(self, tokenizer: Any, eos_token_id: int | Sequence[int] | None = None) -> LogitsProcessor:
        """Return a logits processor for one call of `model.generate`, which constrains it to this grammar.

        >>> grammar = lade.Grammar.json_object()
        >>> ids = model.generate(**inputs, logits_processor=[grammar.processor(tokenizer)], max_new_tokens=100)

        With `custom_generate=lade.decode`, or on an enabled model, tokens that the grammar forces are drafted too.

        Args:
            tokenizer: the tokenizer of the model.
            eos_token_id: ids that end an answer, as in `model.generate`; None for the tokenizer's EOS.

        Raises:
            InputError: the grammar, or the tokenizer, cannot be used.
            MissingExtraError: llguidance is not installed.
        """
        ends = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ()
        return GRAMMARS.load().processor_for([self], tokenizer, ends)


GrammarArgument: TypeAlias = Grammar | Sequence[Grammar]
"""One grammar for all prompts, or one per prompt of a batch."""


class GrammarError(InputError):
    """A grammar takes too long to compile, or an answer cannot follow it any further."""


class _Grammars(Protocol):
    @property
    def processor(self) -> type[LogitsProcessor]: ...
    def processor_for(self, grammars: Sequence[Grammar], tokenizer: Any, ends: Sequence[int]) -> LogitsProcessor: ...
    def with_grammar(
        self, model: PreTrainedModel, grammar: GrammarArgument, arguments: dict[str, Any]
    ) -> dict[str, Any]: ...
    def constraints_for(self, prepared: Prepared, prompts: Sequence[Sequence[int]]) -> Sequence[Constraint | None]: ...


GRAMMARS: Role[_Grammars] = Role("grammars")


def shortened(message: str) -> str:
    """Return an error message of llguidance on one line, shortened."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."


def _understood(schema: Any) -> Any:
    """Return a schema without what constrains nothing and llguidance refuses.

    That is `"propertyNames": {"type": "string"}`, which generators for TypeScript emit for every record type, and each
    `format` that llguidance does not know: by JSON Schema 2020-12, 7.2.1, a format is an annotation. Pydantic has many.

    Raises:
        ValueError: a bound on integers has more than 64 bits, which llguidance takes for another one.
    """
    if not isinstance(schema, Mapping):
        return schema
    understood: dict[str, Any] = {}
    for name, part in schema.items():
        if (name, part) == ("propertyNames", {"type": "string"}):
            continue
        if name == "format" and isinstance(part, str) and part not in _FORMATS:
            continue
        if name in _BOUNDS and _is_large(part) and schema.get("type") != "number":
            raise ValueError(f"{name} is {part}: bounds are supported below 2**63")
        if name in ("const", "enum") and any(map(_is_large, part if isinstance(part, list | tuple) else [part])):
            raise ValueError(f"{name} has a number beyond 2**63: give it as a string")
        if name in _NAMED and isinstance(part, Mapping):
            part = {key: _understood(each) for key, each in part.items()}  # noqa: PLW2901 - the part as it is kept
        elif name not in _VALUES:
            part = [_understood(each) for each in part] if isinstance(part, list | tuple) else _understood(part)  # noqa: PLW2901
        understood[name] = part
    return understood


def _is_large(bound: Any) -> bool:
    return isinstance(bound, int | float) and abs(bound) >= _LARGEST


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name}={value!r:.60} is not valid: give a text")
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        raise InputError(f"{name}={value!r:.60} has a lone surrogate, which cannot be encoded: remove it") from problem
    return value


def _llguidance() -> Any:
    """Import llguidance's grammar compiler."""
    try:
        from llguidance import LLMatcher
    except ImportError as problem:
        raise MissingExtraError("llguidance", "grammar") from problem
    return LLMatcher
