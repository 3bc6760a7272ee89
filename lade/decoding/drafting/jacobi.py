"""Plain Jacobi decoding: one chain of guesses, which each pass replaces by what the model chose at them.

    fed         r ── g1 ── g2 ── g3        the current token, K guesses
    chosen      c0   c1    c2    c3        c0 is right; c1 is too if g1 = c0, and so on: A tokens are accepted
    next        c[A-1] ── c[A] ── ...      the choices behind them are the new guesses, and A - 1 new ones join

It is the baseline of the lookahead paper (arXiv 2402.02057, section 2): right tokens are often found at the wrong
place, and this method forgets them with the next pass.

Source: Santilli, Severino, Postolache, Maiorca, Mancusi, Marin, Rodolà, "Accelerating Transformer Inference for
Translation via Parallel Decoding", ACL 2023, arXiv 2305.10427, algorithm 1, on a block that moves along with the text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from lade.decoding.kernels import Ints
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict
from lade.errors import ConfigError

GUESSES = 8
"""Of the chain, where nobody says how many."""


class JacobiDrafter:
    """Drafts for one row; see `Drafter`.

    Args:
        guesses: K, length of the chain.
        seed: of the guesses for places that no pass has looked at, drawn from the ids of the prompt.

    Raises:
        ConfigError: there is no guess.
    """

    reads = False

    def __init__(self, guesses: int = GUESSES, *, seed: int = 0) -> None:
        if isinstance(guesses, bool) or not isinstance(guesses, int) or guesses < 1:
            raise ConfigError("guesses", guesses, "give a whole number >= 1")
        self.guesses = guesses
        self.chain: list[int] = []
        self._rng = random.Random(seed)
        self._prompt: Sequence[int] = ()

    def read_prompt(self, tokens: Sequence[int], start: int, rows: Ints) -> None:
        """Nothing: it did not ask for readouts."""

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Fill the chain with tokens of the prompt."""
        self._prompt = tokens[:prompt_length]
        self._fill([])

    def look(self, tokens: Sequence[int], max_depth: int | None) -> Sequence[float]:
        """Nothing: its size is fixed."""
        return ()

    def grow(self, tokens: Sequence[int], max_depth: int | None) -> TokenTree:
        """The chain, below the current token."""
        tree = TokenTree(tokens[-1], max_depth)
        tree.add_path(self.chain, "window")
        return tree

    def learn(self, tokens: Sequence[int], picks: Sequence[int], rows: Ints | None, verdict: Verdict) -> None:
        """The model's choices behind the accepted tokens become the chain."""
        self._fill(picks[len(verdict.tokens) :])

    def observe(self, seconds: float, forward_s: float) -> None:
        """Nothing: its size is fixed."""

    def _fill(self, known: Sequence[int]) -> None:
        self.chain = [*known, *self._rng.choices(self._prompt, k=self.guesses - len(known))]
