"""One row of a batch, and its part of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from lade.decoding.drafting.drafter import Draft, Drafter
from lade.decoding.readout import Readout
from lade.decoding.verify import Chooser, Greedy, Verdict, walk
from lade.stats import Step

StopRule = Callable[[Sequence[int]], bool]
_NOT_READ, _NOT_SEEN = Readout([]), torch.empty(0)


class Row:
    """State of one row.

    Args:
        prompt: ids of the prompt, at least one.
        drafter: proposes the tokens to come.
        chooser: turns logits into tokens.
        stop: called with all tokens after each emitted one; returns true to end the row.
        source: ids of a text that drafters learn before the prompt, since its tokens may recur: the encoder's input.

    Attributes:
        is_greedy: whether it takes the argmax, so that its logits are not needed on the host.
        tokens: prompt and output.
        steps: number of decode steps (without prefill) that the row took part in.
        done, problem: whether the row has ended, and the error that ended it; None if none did.
    """

    def __init__(
        self, prompt: Sequence[int], drafter: Drafter, chooser: Chooser, stop: StopRule, source: Sequence[int] = ()
    ) -> None:
        self.tokens = list(prompt)
        self.drafter, self.chooser, self._stop = drafter, chooser, stop
        self.is_greedy = isinstance(chooser, Greedy)
        self.steps = 0
        self.done = False
        self.problem: Exception | None = None
        self._prompt_length, self._source = len(self.tokens), source

    @property
    def written(self) -> list[int]:
        """The tokens after the prompt."""
        return self.tokens[self._prompt_length :]

    @property
    def emitted(self) -> int:
        """How many tokens come after the prompt."""
        return len(self.tokens) - self._prompt_length

    def emit(self, token: int) -> bool:
        """Append a token; return whether a stop rule ends the row there."""
        self.tokens.append(token)
        self.done = self._stop(self.tokens)
        return self.done

    def choose_first(self, logits: torch.Tensor, argmax_ids: Sequence[int]) -> int:
        """Choose the first token by the logits `[1, V]` after the prompt and their argmax, `[1]`; start the drafter."""
        choices = self.chooser.choose_all(logits, [0])
        token = self.chooser.bind(logits, argmax_ids if choices is None else choices.tolist(), self.tokens)(0)
        self.emit(token)
        self.drafter.begin([*self._source, *self.tokens], len(self._source) + self._prompt_length)
        return token

    def fail(self, problem: Exception) -> None:
        """End the row with an error."""
        self.done, self.problem = True, problem


@dataclass
class RowStep:
    """One row's part of one step, filled in as the step proceeds.

    Attributes:
        row, draft: the row itself, and the tree that it feeds.
        verdict: the accepted path and tokens; only the root before the walk.
        logits: `[S, V]`, at the nodes of the draft's tree, set after the forward pass. Empty where nothing needs them.
        choices: `[S]` ids, if the chooser chose at all nodes at once; see `Chooser.choose_all`.
        readout: readout of the logits, including the choices; empty where nothing needs it.
    """

    row: Row
    draft: Draft
    verdict: Verdict = field(default_factory=Verdict)
    logits: torch.Tensor = field(init=False, default=_NOT_SEEN)
    choices: torch.Tensor | None = field(init=False, default=None)
    readout: Readout = field(init=False, default=_NOT_READ)

    def choose_all(self) -> None:
        """Choose at all nodes at once, if the chooser can; an error ends the row."""
        try:
            self.choices = self.row.chooser.choose_all(self.logits, self.draft.tree.depths)
        except Exception as problem:  # noqa: BLE001 - stored as the row's `problem`
            self.row.fail(problem)

    def walk(self) -> None:
        """Accept the tokens that the model chooses. An error of processors or stop rules ends the row."""
        row, ids = self.row, self.readout.argmax_ids if self.choices is None else self.readout.choices
        assert ids is not None
        try:
            walk(self.draft.tree, row.chooser.bind(self.logits, ids, row.tokens), row.emit, self.verdict)
        except Exception as problem:  # noqa: BLE001 - stored as the row's `problem`
            row.fail(problem)

    def report(self, seconds: float) -> Step:
        """Return the step's result for this row, given its duration in seconds."""
        size, rested = len(self.draft.tree.ids), self.row.drafter.rests
        return Step(self.row.steps, self.verdict.tokens, self.verdict.sources, size, seconds, rested=rested)
