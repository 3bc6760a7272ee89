"""What a request is told of its answer beside the ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lade.errors import ConfigError
from lade.hf.answer_text import AnswerText


@dataclass(frozen=True)
class Extras:
    """Arguments of `Engine.add` that `model.generate` does not know.

    Attributes:
        logprobs: ids whose log-probabilities are told with each token; None for none, not even the token's own.
        stop_texts: texts that end the answer; None where its text is not told.
        tokenizer: makes text of ids.
        skip_special_tokens: whether special tokens have no text.
        scope: whose request it is.

    Raises:
        ConfigError: one of them is not valid.
    """

    logprobs: int | None = None
    stop_texts: Sequence[str] | None = None
    tokenizer: Any = None
    skip_special_tokens: bool = True
    scope: str | None = None

    def __post_init__(self) -> None:
        top, stops = self.logprobs, self.stop_texts
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 0):
            raise ConfigError("logprobs", top, "give a whole number >= 0, or None for none")
        if self.scope is not None and not isinstance(self.scope, str):
            raise ConfigError("scope", self.scope, "give a text that names whose request it is, or None")
        if stops is None:
            return
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ConfigError("stop_texts", stops, "give a list of texts, none of them empty; [] to be told the text")
        if not callable(getattr(self.tokenizer, "decode", None)):
            raise ConfigError("tokenizer", self.tokenizer, "give the model's tokenizer, which stop_texts needs")

    def text(self, prompt: Sequence[int]) -> AnswerText | None:
        """Reads the answer to a prompt as text, if that is wanted."""
        if self.stop_texts is None:
            return None
        return AnswerText(self.tokenizer, prompt, self.stop_texts, skip_special_tokens=self.skip_special_tokens)


NO_EXTRAS = Extras()
