"""Logprobs of tokens in the forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lade.server.token_text import TokenText
from lade.stats import Step, TokenLogprobs


def tokens_of(steps: Sequence[Step]) -> Iterator[TokenLogprobs]:
    """All tokens of some steps."""
    for step in steps:
        yield from step.logprobs or ()


def chat_entry(spelling: TokenText, token: TokenLogprobs) -> dict[str, Any]:
    """A token and the likeliest ones in its place."""
    tops = [spelling.entry(each, logprob) for each, logprob in token.top]
    return {**spelling.entry(token.token, token.logprob), "top_logprobs": tops}
