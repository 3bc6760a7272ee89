"""Figures of a decoding run: one `Step` per forward pass and row, and their sums in `Stats`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

KEPT_STEPS = 65_536
"""Number of recent steps whose sizes `Stats` lists; older ones remain in the sums and the histogram."""
_POOR = 0.3  # tokens per step that drafts bring, below which `Stats.explain` says what may help
_NOTABLE = 0.2  # share of the decoding time from which on the time before it is mentioned


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at an emitted token: the log-softmax of the model's logits, before logits processors.

    Attributes:
        token: the emitted id.
        logprob: its log-probability (natural logarithm).
        top: the likeliest ids with their log-probabilities, in descending order.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Step:
    """Result of one forward pass for one row.

    Attributes:
        index: 0 for prefill, then 1, 2, ...
        tokens: ids emitted by this step, after stop rules. Never empty.
        sources: the source of each token: `prefill`, `window`, `pool`, `prompt`, `text`, `memory`, `prediction`,
            `mtp` for one that an MTP layer rated above all else, `grammar` for one that a grammar forced, or `bonus`
            for a token that was not drafted and that the model chose itself; `beam` for all tokens of a beam search,
            in the steps that are added to `Stats`.
        fed: tokens fed to the model, the root included (for prefill: the prompt tokens not yet cached).
        seconds: wall-clock time of the step, in a batch of all rows together, without the time its consumer took.
        logprobs: one per token, if requested by `Engine.add`; else None.
        texts: detokenized text that became final with each token, if `Engine.add` was given `stop_texts`; else None.
            Joined, they are the text of the answer.
        rested: whether drafting rested, as drafts that were not accepted had cost the text all that they may.
    """

    index: int
    tokens: list[int]
    sources: list[str]
    fed: int
    seconds: float
    logprobs: list[TokenLogprobs] | None = None
    texts: list[str] | None = None
    rested: bool = False

    @property
    def accepted_drafts(self) -> int:
        """Number of drafted tokens among `tokens`, in a step after prefill."""
        return len(self.tokens) - self.sources.count("bonus")


@dataclass(frozen=True)
class Surroundings:
    """Circumstances of a generation that `Stats.explain` mentions."""

    pass_s: dict[int, float] = field(default_factory=dict)  # by tokens fed, 1 and 8; empty if it was not measured
    keeps_memory: bool = False  # a `lade.Memory` outlasts the generation
    contention: str = ""  # note on too many threads for this machine; empty if there are not


@dataclass
class Stats:
    """Figures of one or more generations; every call that is given the same object adds to it.

    In a batch each row's part of a forward pass counts as a step, so `tokens_per_step` is the gain of a row; the
    seconds are those of the pass, counted once. The beams of a prompt are one row, which emits a token at each beam
    step until the search of the last prompt ends.

    Attributes:
        generations: rows generated.
        new_tokens: tokens emitted, after stop rules; EOS and the first token, which prefill yields, included.
        steps: forward passes after prefill; in a batch each row's part of one.
        resting_steps: the number of `steps` in which drafting rested, see `Step.rested`.
        step_tokens: tokens fed per step, the root included, of the last 65,536 steps.
        accepted: tokens emitted per step, the bonus token included, of the last 65,536 steps.
        prefill_s: seconds until the first token (of all rows).
        decode_s: seconds of all steps after prefill.
        forward_s: the part of `decode_s` spent in the model's forward pass, cache update included, but without the work
            after verification: compacting the KV cache and updating recurrent states.
        fed_tokens: the sum of `step_tokens`, over all steps.
        accepted_tokens: the sum of `accepted`, over all steps: `new_tokens - generations`.
        histogram: number of steps by (tokens fed, tokens emitted), over all steps.
        draft_tokens: tokens fed for verification: all but the root of each step. Steps of a beam search are not
            counted, as several beams share their tree.
        accepted_draft_tokens: the number of `draft_tokens` that were emitted.
        fallback: reason why `lookahead="auto"` last decoded plainly; None if it never did.
        setup_s: seconds spent once, before decoding, to measure forward passes. No other figure contains them.
        surroundings: circumstances of the last generation; None before it.
    """

    generations: int = 0
    new_tokens: int = 0
    steps: int = 0
    resting_steps: int = 0
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
    setup_s: float = 0.0
    surroundings: Surroundings | None = field(default=None, repr=False, compare=False)

    @property
    def tokens_per_step(self) -> float:
        """Compression ratio: tokens emitted per forward pass after prefill; 0.0 before the first step."""
        return self.accepted_tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were accepted: `accepted_draft_tokens / draft_tokens`; 0.0 without drafts.

        At most one of several alternatives in a tree can be accepted, so a wide tree has a low rate and may still pay;
        see `tokens_per_step`.
        """
        return self.accepted_draft_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def library_s(self) -> float:
        """Seconds of `decode_s` spent outside the model's forward pass."""
        return self.decode_s - self.forward_s

    def add(self, *steps: Step, forward_s: float = 0.0) -> None:
        """Count one forward pass: a step of each row that took part, and the time spent in the model."""
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
        self.resting_steps += step.rested
        self.fed_tokens += step.fed
        self.accepted_tokens += emitted
        if "beam" not in step.sources:
            self.draft_tokens += step.fed - 1
            self.accepted_draft_tokens += step.accepted_drafts
        self.step_tokens.append(step.fed)
        self.accepted.append(emitted)
        self._trim()
        sizes = step.fed, emitted
        self.histogram[sizes] = self.histogram.get(sizes, 0) + 1

    def _trim(self) -> None:
        """Drop the sizes of the oldest steps, which the sums still include."""
        if len(self.accepted) > KEPT_STEPS:
            del self.step_tokens[:-KEPT_STEPS], self.accepted[:-KEPT_STEPS]

    def merge(self, other: Stats) -> None:
        """Add the figures of another run, as if it came after this one."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.step_tokens += other.step_tokens
        self.accepted += other.accepted
        self._trim()
        for sizes, steps in other.histogram.items():
            self.histogram[sizes] = self.histogram.get(sizes, 0) + steps
        self.fallback = other.fallback or self.fallback
        self.surroundings = other.surroundings or self.surroundings

    def explain(self) -> str:
        """Return in two or three sentences what was gained, what was not, and why.

        >>> stats = Stats()
        >>> output = lade.generate(model, **inputs, max_new_tokens=200, stats=stats)
        >>> print(stats.explain())
        Drafted in ... steps: drafts brought ... tokens a step...
        """
        if not self.steps:
            return "Nothing to explain: no token was generated after the first."
        drafted = sum(count for (fed, _), count in self.histogram.items() if fed > 1)
        brought = self.tokens_per_step - 1
        where = self.surroundings or Surroundings()
        sentences = [f"Drafted in {drafted:,} of {self.steps:,} steps: drafts brought {brought:.1f} tokens a step."]
        if self.fallback is not None:
            sentences = [f"Running at normal speed: {self.fallback}."]
        elif {1, 8} <= where.pass_s.keys():
            sentences.append(self._verdict(where.pass_s))
        if self.resting_steps:
            sentences.append(
                f"Drafting rested in {self.resting_steps:,} steps: drafts that were not accepted had cost what they "
                "may, 3 % of a text and two passes."
            )
        if self.fallback is None and brought < _POOR and not where.keeps_memory:
            sentences.append("A memory kept over several texts helps if they resemble each other: lade.Memory().")
        if self.setup_s > _NOTABLE * (self.prefill_s + self.decode_s):
            sentences.append(
                f"{self.setup_s:.1f} s went into measuring passes, which happens once and is in no other figure."
            )
        return " ".join([*sentences, *([where.contention] if where.contention else [])])

    def _verdict(self, pass_s: dict[int, float]) -> str:
        """Return a sentence about the price of drafts and the gain."""
        relative = pass_s[8] / pass_s[1]
        price = f"A pass over 8 tokens takes {relative:.2f} times as long as over one"
        if not self.decode_s:
            return f"{price}."
        each = max(0.0, relative - 1) / 7  # of a further token, in passes over one
        cost = 1 + each * (self.fed_tokens / self.steps - 1)
        gain = self.tokens_per_step / cost * (self.forward_s / self.decode_s)
        return f"{price}: about {gain:.1f} times as fast as token by token."

    def reset(self) -> None:
        """Reset all figures to zero."""
        self.__init__()  # type: ignore[misc]


_SUMS = [each.name for each in fields(Stats) if each.type in ("int", "float")]
