"""Logprobs of tokens in the forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lade.server.token_text import TextOffsets, TokenText, finite
from lade.stats import Step, TokenLogprobs

OldForm = dict[str, list[Any]]
"""Of `/v1/completions`: lists that are as long as each other."""


def tokens_of(steps: Sequence[Step]) -> Iterator[TokenLogprobs]:
    """All tokens of some steps."""
    for step in steps:
        yield from step.logprobs or ()


def chat_entry(spelling: TokenText, token: TokenLogprobs) -> dict[str, Any]:
    """A token and the likeliest ones in its place."""
    tops = [spelling.entry(each, logprob) for each, logprob in token.top]
    return {**spelling.entry(token.token, token.logprob), "top_logprobs": tops}


class CompletionLogprobs:
    """Logprobs of a text in the old form, told piece by piece: where a token begins depends on those before it.

    Args:
        spelling: of the tokens.
    """

    def __init__(self, spelling: TokenText) -> None:
        self._spelling, self._offsets = spelling, TextOffsets(spelling)

    def of_prompt(self, first: int, text: str, others: Sequence[TokenLogprobs]) -> OldForm:
        """Those of a prompt, about whose first token nothing is said.

        Args:
            first: that token.
            text: of the prompt, as it is shown; tokenizers may put a space before it.
            others: the other tokens.
        """
        told = self.of([TokenLogprobs(first, 0.0, []), *others])
        told["token_logprobs"][0] = told["top_logprobs"][0] = None
        hidden = max(0, self._offsets.end - len(text))
        self._offsets.end -= hidden
        told["text_offset"] = [max(0, offset - hidden) for offset in told["text_offset"]]
        return told

    def of(self, tokens: Sequence[TokenLogprobs]) -> OldForm:
        """Those of the tokens that come next."""
        spelled = self._spelling
        return {
            "tokens": [spelled.text(each.token) for each in tokens],
            "token_logprobs": [finite(each.logprob) for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": self._offsets.take(each.token for each in tokens),
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """The likeliest ones, and the token itself; of several that are spelled alike the likeliest."""
        made: dict[str, float] = {}
        for each, value in (*token.top, (token.token, token.logprob)):
            made.setdefault(self._spelling.text(each), finite(value))
        return made
