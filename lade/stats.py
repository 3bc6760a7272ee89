"""What a decoding run reports: one `Step` per forward pass and row, and the sums of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

KEPT_STEPS = 65_536
"""Steps whose sizes `Stats` lists one by one; of older ones it keeps the sums and the histogram."""


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely the model found an emitted token, and others in its place: the log-softmax of its own logits, before
    processors.

    Attributes:
        token: the id that was emitted.
        logprob: its natural logarithm of probability.
        top: the likeliest ids and theirs, the likeliest first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Step:
    """What one forward pass yielded, in a batch for one of its rows.

    Attributes:
        index: 0 for prefill, then 1, 2, ...
        tokens: ids emitted by this step, after the stop cut. Never empty.
        sources: for each token its source: `prefill`, `window`, `pool`, `prompt`, `text`, `memory`, `prediction`,
            `mtp` for one that an MTP layer found likelier than all else did, `grammar` for one that a grammar left no
            choice about, or `bonus` for a token that was not proposed and the
            model chose itself; `beam` for all tokens of a beam search, in the steps that are added to `Stats`.
        fed: tokens fed to the model, the root included (for prefill: the prompt tokens not yet cached).
        seconds: wall-clock time of the step, in a batch of all rows together, without the time its consumer took.
        logprobs: one a token, where `Engine.add` was asked for them; else None.
        texts: what of the text could be shown with each token, where `Engine.add` was given `stop_texts`; else None.
            All of them joined are the text of the answer.
    """

    index: int
    tokens: list[int]
    sources: list[str]
    fed: int
    seconds: float
    logprobs: list[TokenLogprobs] | None = None
    texts: list[str] | None = None


@dataclass
class Stats:
    """Figures of one or more generations; every call that is given the same object adds to it.

    In a batch each row's part of a forward pass counts as a step, so that `tokens_per_step` is what a row gains;
    the seconds are those of the pass, counted once. The beams of a prompt are one row, which emits a token at each of
    their steps, until the search of the last prompt ends.

    Attributes:
        generations: rows generated.
        new_tokens: tokens emitted, after the stop cut; EOS and the first token, which prefill yields, included.
        steps: forward passes after prefill; in a batch each row's part of one.
        step_tokens: tokens fed, the root included; one entry a step, of the last 65,536 steps.
        accepted: tokens emitted, the bonus token included; one entry a step, of the last 65,536 steps.
        prefill_s: seconds until the first token (of all rows).
        decode_s: seconds of all steps after prefill.
        forward_s: the part of `decode_s` spent inside the model's forward pass, cache update included, but not what
            follows verification: keys are moved, and states take in the accepted path.
        fed_tokens: the sum of `step_tokens`, over all steps.
        accepted_tokens: the sum of `accepted`, over all steps: `new_tokens - generations`.
        histogram: how many steps there were with each pair of (tokens fed, tokens emitted), of all steps.
        draft_tokens: tokens fed to be verified: all but the root of each step. The steps of a beam search count for
            none, as several beams share their tree.
        accepted_draft_tokens: those of them that were emitted.
        fallback: why `lookahead="auto"` decoded plainly, the last time that it did; None if it never did.
    """

    generations: int = 0
    new_tokens: int = 0
    steps: int = 0
    step_tokens: list[int] = field(default_factory=list, repr=False)
    accepted: list[int] = field(default_factory=list, repr=False)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    forward_s: float = 0.0
    fed_tokens: int = 0
    accepted_tokens: int = 0
    histogram: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    fallback: str | None = None

    @property
    def tokens_per_step(self) -> float:
        """The compression ratio: tokens emitted per forward pass after prefill; 0.0 before the first step."""
        return self.accepted_tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were accepted: `accepted_draft_tokens / draft_tokens`; 0.0 without drafts.

        Of the alternatives in a tree one at most can be accepted, so a wide tree has a low rate and may still pay:
        what it gains is in `tokens_per_step`.
        """
        return self.accepted_draft_tokens / self.draft_tokens if self.draft_tokens else 0.0

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
                self._count(step)
        if steps[0].index == 0:
            self.prefill_s += steps[0].seconds
        else:
            self.decode_s += steps[0].seconds
            self.forward_s += forward_s

    def _count(self, step: Step) -> None:
        """Count a step after prefill."""
        emitted = len(step.tokens)
        self.steps += 1
        self.fed_tokens += step.fed
        self.accepted_tokens += emitted
        if "beam" not in step.sources:
            self.draft_tokens += step.fed - 1
            self.accepted_draft_tokens += emitted - step.sources.count("bonus")
        self.step_tokens.append(step.fed)
        self.accepted.append(emitted)
        self._forget()
        sizes = step.fed, emitted
        self.histogram[sizes] = self.histogram.get(sizes, 0) + 1

    def _forget(self) -> None:
        """Of the oldest steps only the sums are kept."""
        if len(self.accepted) > KEPT_STEPS:
            del self.step_tokens[:-KEPT_STEPS], self.accepted[:-KEPT_STEPS]

    def merge(self, other: Stats) -> None:
        """Add the figures of another run, as of one that came after this one."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.step_tokens += other.step_tokens
        self.accepted += other.accepted
        self._forget()
        for sizes, steps in other.histogram.items():
            self.histogram[sizes] = self.histogram.get(sizes, 0) + steps
        self.fallback = other.fallback or self.fallback

    def reset(self) -> None:
        """Empty all figures."""
        self.__init__()  # type: ignore[misc]


_SUMS = (
    "generations", "new_tokens", "steps", "fed_tokens", "accepted_tokens", "draft_tokens", "accepted_draft_tokens",
    "prefill_s", "decode_s", "forward_s",
)  # fmt: skip


def distinct_ngrams(tokens: Sequence[int], length: int = 4) -> float:
    """Share of distinct n-grams among all of a text; 1.0 for one too short to have any.

    A text that loops has a low share, and flatters every method that guesses n-grams.
    """
    ngrams = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0
