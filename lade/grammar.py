"""`lade.Grammar`: what an answer may be, by a JSON schema, a regular expression, choices or a Lark grammar."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from lade.errors import InputError, MissingExtraError
from lade.model import joint

if TYPE_CHECKING:
    from transformers import LogitsProcessor

_LONGEST_REASON = 300
_VALUES = frozenset(["const", "enum", "default", "examples"])
"""Members of a schema that are no schemas."""


@dataclass(frozen=True)
class Grammar:
    """What an answer may be: made by one of the functions below.

    >>> grammar = lade.Grammar.json_schema({"type": "object", "properties": {"name": {"type": "string"}}})
    >>> ids = lade.generate(model, **inputs, max_new_tokens=100, grammar=grammar, tokenizer=tokenizer)

    An answer that ends by itself is complete; one that is cut off by its greatest length may be not.

    Attributes:
        source: the grammar as llguidance writes it.
    """

    source: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | type, *, whitespace: bool = False) -> Grammar:
        """JSON that a schema describes, its members in the order of the schema.

        Args:
            schema: a JSON schema, as an object or as JSON, or a pydantic model.
            whitespace: whether the answer may have whitespace between tokens; without, more of it is certain, which
                takes fewer steps.

        Raises:
            InputError: it is no schema. What of a schema is not supported is found when it is used with a tokenizer.
            MissingExtraError: llguidance is not installed.
        """
        of_model = getattr(schema, "model_json_schema", None)
        given = of_model() if of_model is not None else schema
        try:
            text = given if isinstance(given, str) else json.dumps(_said(given), allow_nan=False)
            return cls(_llguidance().grammar_from_json_schema(text, overrides={"whitespace_flexible": whitespace}))
        except (TypeError, ValueError, RecursionError) as problem:
            raise InputError(f"the schema cannot be used: {shortened(str(problem))}") from problem

    @classmethod
    def json_object(cls, *, whitespace: bool = False) -> Grammar:
        """Any JSON object; see `json_schema`."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text all of which a regular expression matches, in the syntax of Rust's regex crate.

        Raises:
            InputError: it is no text. What of a pattern is not supported is found when it is used with a tokenizer.
            MissingExtraError: llguidance is not installed.
        """
        return cls(_llguidance().grammar_from_regex(_text(pattern, "pattern")))

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Grammar:
        """One of several texts.

        Raises:
            InputError: there is none, or one is no text or empty.
        """
        several = [] if isinstance(texts, str) else list(texts)
        if not several or not all(isinstance(text, str) and text for text in several):
            raise InputError(f"choice={texts!r:.60} is not valid: give a list of texts, none of them empty")
        alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in several)
        return cls.lark(f"start: TEXT\nTEXT: {alternatives}")  # a terminal: as rules, two thousand were too many

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Text of a context-free grammar in llguidance's dialect of Lark, whose first rule is `start`."""
        return cls(_llguidance().grammar_from_lark(_text(grammar, "grammar")))

    @classmethod
    def nested(cls, lark: str, parts: Mapping[str, Grammar]) -> Grammar:
        """A Lark grammar that has other grammars in it, each written `@name`."""
        listed = [{"name": name, **part._definition} for name, part in parts.items()]
        return cls(json.dumps({"grammars": [{"name": "nesting", "lark_grammar": lark}, *listed]}, ensure_ascii=False))

    @property
    def _definition(self) -> dict[str, Any]:
        """As one of several grammars; one that is nested itself is not to be nested again."""
        if not self.source.startswith("{"):
            return {"lark_grammar": self.source}
        (found,) = json.loads(self.source)["grammars"]
        return {kind: value for kind, value in found.items() if kind != "name" and value is not None}

    def processor(self, tokenizer: Any, eos_token_id: int | Sequence[int] | None = None) -> LogitsProcessor:
        """A logits processor for `model.generate`, of one generation at a time, with the same tokens.

        >>> grammar = lade.Grammar.json_object()
        >>> ids = model.generate(**inputs, logits_processor=[grammar.processor(tokenizer)], max_new_tokens=100)

        With `custom_generate=lade.decode`, or an enabled model, guesses are made by it, too.

        Args:
            tokenizer: the model's.
            eos_token_id: what ends an answer, as in `model.generate`; None for the tokenizer's own.

        Raises:
            InputError: the grammar, or the tokenizer, cannot be used.
            MissingExtraError: llguidance is not installed.
        """
        ends = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id or ()
        processor: LogitsProcessor = joint.load("grammar").processor_of_tokenizer([self], tokenizer, ends)
        return processor


GrammarArgument: TypeAlias = Grammar | Sequence[Grammar]
"""One for all prompts, or one for each prompt of a batch."""


def shortened(message: str) -> str:
    """A message of llguidance on one line."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."


def _said(schema: Any) -> Any:
    """A schema without `"propertyNames": {"type": "string"}`, which is so in any JSON, and which llguidance refuses.

    What describes records in TypeScript writes it for each of them.
    """
    if isinstance(schema, list | tuple):
        return [_said(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {name: part for name, part in schema.items() if (name, part) != ("propertyNames", {"type": "string"})}
    return {name: part if name in _VALUES else _said(part) for name, part in kept.items()}


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{name}={value!r:.60} is not valid: give a text")
    try:
        value.encode()
    except UnicodeEncodeError as problem:
        raise InputError(f"{name}={value!r:.60} has half a character in it, which is no text") from problem
    return value


def _llguidance() -> Any:
    """What writes grammars."""
    try:
        from llguidance import LLMatcher
    except ImportError as problem:
        raise MissingExtraError("llguidance", "grammar") from problem
    return LLMatcher
