"""How the prompts of a command are decoded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lade.cli.encoder import Encoder
from lade.cli.loading.loaded_model import LoadedModel
from lade.cli.options.decoding import Choices
from lade.cli.run import config_dict
from lade.config import Lookahead, LookaheadConfig
from lade.hf.grammar.grammar import Grammar
from lade.hf.refusals import resolve


@dataclass(frozen=True)
class GenerationPlan:
    """How all prompts of a command are decoded.

    Attributes:
        loaded: what generates.
        encode: makes ids of a prompt.
        lookahead: as in `lade.generate`.
        choices: settled ones.
        max_new_tokens: of each.
        grammar: that answers have to follow, if any.
    """

    loaded: LoadedModel
    encode: Encoder
    lookahead: Lookahead
    choices: Choices
    max_new_tokens: int
    grammar: Grammar | None = None

    @property
    def form(self) -> dict[str, Any]:
        """Arguments of `lade.generate` about the grammar."""
        return {} if self.grammar is None else {"grammar": self.grammar, "tokenizer": self.loaded.tokenizer}

    @property
    def settings(self) -> dict[str, Any]:
        """The options, as far as the object that `--json` prints does not have them."""
        shown = self.choices.as_dict()
        others = {name: value for name, value in asdict(self.choices).items() if name not in shown}
        given = {"method": _method(self.config), "max_new_tokens": self.max_new_tokens, **others}
        form = {} if self.grammar is None else {"grammar": self.grammar.source}
        rounding = {"invariant": True} if self.loaded.invariant else {}
        return {**given, **form, **self.loaded.variant, **rounding, **self.encode.settings}

    @property
    def config(self) -> LookaheadConfig | None:
        """The method and its sizes; None decodes plainly."""
        return resolve(self.lookahead)[0]

    @property
    def terms(self) -> dict[str, Any]:
        """What all lines of a file have alike."""
        return {
            "model": self.loaded.name,
            "dtype": self.loaded.dtype,
            "packed": self.loaded.packed,
            "settings": self.settings,
            "config": config_dict(self.config),
            **self.choices.as_dict(),
        }


def _method(config: LookaheadConfig | None) -> str:
    """What it is called on the command line."""
    if config is None:
        return "plain"
    return "adaptive" if config.adaptive else "lookahead"
