"""How a request is decoded and what it is told, beside what `model.generate` knows of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lade.config import LookaheadConfig
from lade.errors import ConfigError
from lade.hf.answer_text import AnswerText
from lade.hf.grammar.grammar import Grammar
from lade.hf.predictions import Prediction, refuse_without_guesses

PLAIN = LookaheadConfig(window=0, ngram=2, guesses=0)
"""The empty tree: one token a step."""
_SEEDS = 2**64


@dataclass(frozen=True)
class Extras:
    """Arguments of `Engine.add` that `model.generate` does not know.

    Attributes:
        lookahead: the method and its sizes; None for one token a step.
        seed: of its draws; None: one is drawn.
        prediction: a text that the answer is expected to follow.
        grammar: what the answer may be.
        logprobs: ids whose log-probabilities are told with each token; None for none, not even the token's own.
        prompt_logprobs: the same with each token of the prompt.
        stop_texts: texts that end the answer; None where its text is not told.
        tokenizer: makes text of ids.
        skip_special_tokens: whether special tokens have no text.
        scope: whose texts it shares.
        client: who asks; None: as the scope says.

    Raises:
        ConfigError: one of them is not valid.
    """

    lookahead: LookaheadConfig | None = None
    seed: int | None = None
    prediction: Prediction | None = None
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_texts: Sequence[str] | None = None
    tokenizer: Any = None
    skip_special_tokens: bool = True
    scope: str | None = None
    client: str | None = None

    def __post_init__(self) -> None:
        refuse_without_guesses(self.prediction, self.lookahead)
        seed, stops = self.seed, self.stop_texts
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < _SEEDS):
            raise ConfigError("seed", seed, "give a whole number from 0 to 2**64 - 1, or None to have one drawn")
        for name, top in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 0):
                raise ConfigError(name, top, "give a whole number >= 0, or None for none")
        for name, given in (("scope", self.scope), ("client", self.client)):
            if given is not None and not isinstance(given, str):
                raise ConfigError(name, given, "give a text that names whose request it is, or None")
        if stops is None:
            return
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ConfigError("stop_texts", stops, "give a list of texts, none of them empty; [] to be told the text")
        if not callable(getattr(self.tokenizer, "decode", None)):
            raise ConfigError("tokenizer", self.tokenizer, "give the model's tokenizer, which stop_texts needs")

    @property
    def config(self) -> LookaheadConfig:
        """The method and its sizes."""
        return self.lookahead or PLAIN

    def text(self, prompt: Sequence[int]) -> AnswerText | None:
        """Reads the answer to a prompt as text, if that is wanted."""
        if self.stop_texts is None:
            return None
        return AnswerText(self.tokenizer, prompt, self.stop_texts, skip_special_tokens=self.skip_special_tokens)
