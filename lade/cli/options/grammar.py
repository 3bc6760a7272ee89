"""Options about what an answer may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lade.cli.options.grouping import in_panel
from lade.cli.prompts import check_text, read_text
from lade.errors import ConfigError, InputError

if TYPE_CHECKING:
    from lade.hf.grammar.grammar import Grammar

_option = in_panel("What the answer may be")


@dataclass(frozen=True)
class AnswerForm:
    """The form that answers have to have; one of these, or none.

    Attributes:
        json_schema: a file with a JSON schema.
        regex: a pattern that matches all of the answer.
        grammar: a file with a Lark grammar.
    """

    json_schema: Annotated[Path | None, _option(metavar="FILE", help="JSON of the schema in this file.")] = None
    regex: Annotated[str | None, _option(metavar="PATTERN", help="Text all of which this pattern matches.")] = None
    grammar: Annotated[Path | None, _option(metavar="FILE", help="Text of the Lark grammar in this file.")] = None

    def read(self) -> Grammar | None:
        """The grammar; None for no form.

        Raises:
            ConfigError: there are several, or it is none.
            InputError: a file cannot be read.
            MissingExtraError: llguidance is not installed.
        """
        if not self._given:
            return None
        if len(self._given) > 1:
            (first, _), (name, value), *_ = self._given
            raise ConfigError(name, value, f"leave out --{first}, or this")
        from lade.hf.grammar.grammar import Grammar

        if self.json_schema is not None:
            schema = read_text(self.json_schema, "JSON schema")
            with self._named():
                return Grammar.json_schema(schema)
        if self.grammar is not None:
            return Grammar.lark(read_text(self.grammar, "grammar"))
        check_text(self.regex or "", "the pattern of --regex")
        return Grammar.regex(self.regex or "")

    def check(self, grammar: Grammar | None, tokenizer: Any, eos_token_id: int | Sequence[int] | None) -> None:
        """Compile what `read` has returned: most of what is wrong with grammars is found then.

        Args:
            grammar: None for no form.
            tokenizer: the model's.
            eos_token_id: what ends its answers.

        Raises:
            ConfigError: the model's answers cannot follow it.
            MissingExtraError: llguidance is not installed.
        """
        if grammar is not None:
            with self._named():
                grammar.processor(tokenizer, eos_token_id)

    @property
    def _given(self) -> list[tuple[str, str]]:
        """Options that were given, and their values."""
        values = {each.name.replace("_", "-"): getattr(self, each.name) for each in fields(self)}
        return [(name, str(value)) for name, value in values.items() if value is not None]

    @contextmanager
    def _named(self) -> Iterator[None]:
        """What is wrong with the grammar is an error of the option that it came by."""
        try:
            yield
        except InputError as problem:
            ((name, value),) = self._given
            raise ConfigError(name, value, str(problem)) from problem
