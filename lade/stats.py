"""What a decoding run reports: one `Step` per forward pass and row, and the sums of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """What one forward pass yielded, in a batch for one of its rows.

    Attributes:
        index: 0 for prefill, then 1, 2, ...
        tokens: ids emitted by this step, after the stop cut. Never empty.
        sources: for each token who proposed it: `prefill`, `window`, `pool`, `prompt`, `text`, `memory`, or `bonus`
            for a token that nobody proposed and the model chose itself.
        fed: tokens fed to the model, the root included (for prefill: the prompt tokens not yet cached).
        seconds: wall-clock time of the step, in a batch of all rows together, without the time its consumer took.
    """

    index: int
    tokens: list[int]
    sources: list[str]
    fed: int
    seconds: float


@dataclass
class Stats:
    """Figures of one or more generations; whoever is handed the same object adds to it.

    In a batch each row's part of a forward pass counts as a step, so that `tokens_per_step` says what a row gains;
    the seconds are those of the pass, counted once. The beams of a prompt are one row, which emits a token at each of
    their steps, until the search of the last prompt ends.

    Attributes:
        generations: rows generated.
        new_tokens: tokens emitted, after the stop cut; EOS and the first token, which prefill yields, included.
        steps: forward passes after prefill; in a batch each row's part of one.
        step_tokens: tokens fed, the root included; one entry a step.
        accepted: tokens emitted, the bonus token included; one entry a step.
            `sum(accepted) == new_tokens - generations`.
        prefill_s: seconds until the first token (of all rows).
        decode_s: seconds of all steps after prefill.
        forward_s: the part of `decode_s` spent inside the model's forward pass, cache update included.
    """

    generations: int = 0
    new_tokens: int = 0
    steps: int = 0
    step_tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    forward_s: float = 0.0

    @property
    def tokens_per_step(self) -> float:
        """The compression ratio: tokens emitted per forward pass after prefill; 0.0 before the first step."""
        return sum(self.accepted) / self.steps if self.steps else 0.0

    @property
    def library_s(self) -> float:
        """Seconds of `decode_s` spent outside the model's forward pass."""
        return self.decode_s - self.forward_s

    def add(self, *steps: Step, forward_s: float = 0.0) -> None:
        """Count one forward pass: a step of each row that took part, and the pass's time inside the model."""
        for step in steps:
            self.new_tokens += len(step.tokens)
            if step.index == 0:
                self.generations += 1
            else:
                self.steps += 1
                self.step_tokens.append(step.fed)
                self.accepted.append(len(step.tokens))
        if steps[0].index == 0:
            self.prefill_s += steps[0].seconds
        else:
            self.decode_s += steps[0].seconds
            self.forward_s += forward_s

    def reset(self) -> None:
        """Empty all figures."""
        self.__init__()  # type: ignore[misc]


def distinct_ngrams(tokens: Sequence[int], length: int = 4) -> float:
    """Share of distinct n-grams among all of a text; 1.0 for one too short to have any.

    A text that loops has a low share, and flatters every method that guesses n-grams.
    """
    ngrams = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0
