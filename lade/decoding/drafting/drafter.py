"""Drafters: what guesses the tokens to come. Whatever they guess, the text is the same; only its speed differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lade.decoding.kernels import Ints
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict


class Drafter(Protocol):
    """Drafts the trees of one row.

    Attributes:
        reads: whether it wants to know the likeliest tokens of each row of logits.
    """

    reads: bool

    def read_prompt(self, tokens: Sequence[int], start: int, rows: Ints) -> None:
        """Be told what prefill said behind the tokens from number `start` on; `rows` is `[T, WIDTH]`, see `read`."""
        ...

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Get ready, once prefill has emitted the first token."""
        ...

    def look(self, tokens: Sequence[int], max_depth: int | None) -> Sequence[float]:
        """Find what the next step could feed; the scores of all nodes, or nothing where sizes are not weighed."""
        ...

    def grow(self, tokens: Sequence[int], max_depth: int | None) -> TokenTree:
        """The tree of the next step; its root is the last of `tokens`, and no node lies deeper than `max_depth`."""
        ...

    def learn(self, tokens: Sequence[int], picks: Sequence[int], rows: Ints | None, verdict: Verdict) -> None:
        """Take in what a pass over the last tree showed.

        Args:
            tokens: the row's, with those that the walk has accepted.
            picks: `[S]`, the argmax at each node.
            rows: `[S, WIDTH]`, see `read`, or None where `reads` is false.
            verdict: what was accepted.
        """
        ...

    def observe(self, seconds: float, forward_s: float) -> None:
        """Be told how long the step took, and how much of that the model did."""
        ...
