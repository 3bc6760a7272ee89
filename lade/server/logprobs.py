"""Logprobs of tokens in the forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprob:
    """How likely a token was, by the model's raw logits.

    Attributes:
        token: its id.
        logprob: its own.
        top: the likeliest ones, with theirs.
    """

    token: int
    logprob: float
    top: Sequence[tuple[int, float]]


def tokens_of(steps: Sequence[Step]) -> Iterator[TokenLogprob]:
    """All tokens of some steps."""
    for step in steps:
        yield from step.logprobs or ()


def chat_entry(spelling: TokenText, token: TokenLogprob) -> dict[str, Any]:
    """A token and the likeliest ones in its place."""
    tops = [spelling.entry(each, logprob) for each, logprob in token.top]
    return {**spelling.entry(token.token, token.logprob), "top_logprobs": tops}
