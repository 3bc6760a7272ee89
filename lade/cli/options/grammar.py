"""Options about what an answer may be."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from lade.cli.options.grouping import in_panel
from lade.cli.prompts import check_text, read_text
from lade.errors import ConfigError

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
            ConfigError: there are several.
            InputError: a file cannot be read, or holds none.
            MissingExtraError: llguidance is not installed.
        """
        given = [each.name for each in fields(self) if getattr(self, each.name) is not None]
        if not given:
            return None
        if len(given) > 1:
            name = given[1].replace("_", "-")
            raise ConfigError(name, str(getattr(self, given[1])), f"leave out --{given[0].replace('_', '-')}, or this")
        from lade.hf.grammar.grammar import Grammar

        if self.json_schema is not None:
            return Grammar.json_schema(read_text(self.json_schema, "JSON schema"))
        if self.grammar is not None:
            return Grammar.lark(read_text(self.grammar, "grammar"))
        check_text(self.regex or "", "the pattern of --regex")
        return Grammar.regex(self.regex or "")
