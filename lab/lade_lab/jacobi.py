"""Plain Jacobi decoding: one chain of guesses, which each pass replaces by what the model chose at them.

    fed         r ── g1 ── g2 ── g3        the current token, K guesses
    chosen      c0   c1    c2    c3        c0 is right; c1 is too if g1 = c0, and so on: A tokens are accepted
    next        c[A-1] ── c[A] ── ...      the choices after them are the new guesses, and A - 1 new ones join

It is the baseline of the lookahead paper (arXiv 2402.02057, section 2): right tokens are often found at the wrong
place, and this method forgets them with the next pass.

Source: Santilli, Severino, Postolache, Maiorca, Mancusi, Marin, Rodolà, "Accelerating Transformer Inference for
Translation via Parallel Decoding", ACL 2023, arXiv 2305.10427, algorithm 1, on a block that moves along with the text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from lade.decoding.drafting.drafter import Draft, Drafter
from lade.decoding.readout import Readout
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict
from lade.errors import ConfigError

GUESSES = 8
"""Length of the chain by default."""


class JacobiDrafter(Drafter):
    """Drafts for one row; see `Drafter`.

    Args:
        guesses: K, length of the chain.
        seed: seeds the guesses for places that no pass has reached, which are drawn from the ids of the prompt.

    Raises:
        ConfigError: there is no guess.
    """

    def __init__(self, guesses: int = GUESSES, *, seed: int = 0) -> None:
        if isinstance(guesses, bool) or not isinstance(guesses, int) or guesses < 1:
            raise ConfigError("guesses", guesses, "give a whole number >= 1")
        self.guesses = guesses
        self.chain: list[int] = []
        self._rng = random.Random(seed)
        self._prompt: Sequence[int] = ()

    def begin(self, tokens: Sequence[int], prompt_length: int) -> None:
        """Fill the chain with tokens of the prompt."""
        self._prompt = tokens[:prompt_length]
        self._fill([])

    def draft(self, context: Sequence[int], max_depth: int | None) -> Draft:
        """The chain, below the current token."""
        tree = TokenTree(context[-1], max_depth)
        tree.add_path(self.chain, "window")
        return Draft(tree)

    def learn(self, context: Sequence[int], draft: Draft, readout: Readout, verdict: Verdict) -> None:
        """The model's choices after the accepted tokens become the chain."""
        self._fill(readout.argmax_ids[len(verdict.tokens) :])

    def _fill(self, known: Sequence[int]) -> None:
        self.chain = [*known, *self._rng.choices(self._prompt, k=self.guesses - len(known))]
