"""One row of a batch that is being written: its tokens, and who chooses, drafts and stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lade.decoding.choose import Chooser
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.kernels import Ints
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict

StopRule = Callable[[Sequence[int]], bool]


class Row:
    """State of one row.

    Args:
        prompt: ids of the prompt, at least one.
        drafter: guesses the tokens to come.
        chooser: turns logits into tokens.
        stop: called with all tokens after each emitted one; true ends the row.

    Attributes:
        tokens: prompt and output.
        steps: passes after prefill that it took part in.
        done: whether it has ended.
        problem: the error that ended it, if one did.
    """

    def __init__(self, prompt: Sequence[int], drafter: Drafter, chooser: Chooser, stop: StopRule) -> None:
        self.tokens = list(prompt)
        self.drafter, self.chooser, self._stop = drafter, chooser, stop
        self.steps = 0
        self.done = False
        self.problem: Exception | None = None
        self._prompt_length = len(self.tokens)

    @property
    def written(self) -> list[int]:
        """The tokens behind the prompt."""
        return self.tokens[self._prompt_length :]

    def emit(self, token: int) -> bool:
        """Append a token; returns whether a stop rule ends the row with it."""
        self.tokens.append(token)
        self.done = self._stop(self.tokens)
        return self.done

    def open(self, logits: torch.Tensor, picks: Sequence[int]) -> int:
        """Choose the first token, and get ready to draft.

        Args:
            logits: `[1, V]`, behind the prompt.
            picks: `[1]`, their argmax.
        """
        ahead = self.chooser.look_ahead(logits, [0])
        token = self.chooser.open(logits, picks if ahead is None else ahead.tolist(), self.tokens)(0)
        self.emit(token)
        self.drafter.begin(self.tokens, self._prompt_length)
        return token

    def fail(self, problem: Exception) -> None:
        """End with an error."""
        self.done, self.problem = True, problem

    def look(self, max_depth: int | None) -> Sequence[float]:
        """Find what the next step could feed; see `Drafter`."""
        return self.drafter.look(self.tokens, max_depth)

    def grow(self, max_depth: int | None) -> TokenTree:
        """The tree of the next step, under the current token."""
        self.steps += 1
        return self.drafter.grow(self.tokens, max_depth)

    def learn(self, picks: Sequence[int], rows: Ints | None, verdict: Verdict) -> None:
        """Take in what a step showed.

        Args:
            picks: `[S]`, the argmax at each node of the tree that `grow` returned last.
            rows: `[S, WIDTH]`, see `read`, where the drafter asks for them.
            verdict: what the walk accepted.
        """
        self.drafter.learn(self.tokens, picks, rows, verdict)
