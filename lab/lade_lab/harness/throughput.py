"""Throughput of batches and of the engine; latency of arriving requests.

Transformers gets the prompts in batches, in their order: a batch ends when its last row does. In the engine the next
prompt takes the place of one that has ended. With arrivals, requests come at random times, the same for all arms: the
engine takes each as it comes, `model.generate` answers one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import Any

import torch

from lade.config import LookaheadConfig
from lade.hf.call import original_generate
from lade.hf.generate import generate
from lade.memory import Memory
from lade.serving.engine import Engine
from lade.serving.request import PLAIN
from lade.stats import Stats, Step
from lade_lab.harness.arms import Models, Place, generate_arguments, inputs_of
from lade_lab.harness.mismatch import Judge
from lade_lab.results import Settings

REFERENCE = "hf"
Answers = list[list[int]]


@dataclass
class Trial:
    """Throughput of one arm over all prompts and rounds.

    Attributes:
        name: of the arm.
        answers: new tokens of each prompt, of the last round.
        seconds: until the last answer, of each round.
        latencies: seconds from the arrival of each request to its last token; empty without arrivals.
        stats: of the last round's steps; None for transformers' own.
        parting: answers that differ from the reference's, of the last round.
        faults: those among them that rounding does not explain.
    """

    name: str
    answers: Answers = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    stats: Stats | None = None
    parting: int = 0
    faults: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Median over rounds."""
        return median(sum(map(len, self.answers)) / each for each in self.seconds)

    def as_dict(self, reference: Trial) -> dict[str, Any]:
        """The record, with ratios to the reference's, round by round."""
        stats, late = self.stats, self.latencies
        ratios = [base / own for base, own in zip(reference.seconds, self.seconds, strict=True)]
        return {
            "name": self.name,
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "requests_per_s": median(len(self.answers) / each for each in self.seconds),
            "speedup": median(ratios),
            "tokens_per_step": stats.tokens_per_step if stats and stats.steps else None,
            "fed_per_step": stats.fed_tokens / stats.steps if stats and stats.steps else None,
            "latency_median_s": median(late) if late else None,
            "latency_p95_s": quantiles(late, n=20)[-1] if len(late) > 1 else None,
            "parting": self.parting,
            "faults": self.faults,
        }


Arm = Callable[[Trial, int], None]
"""Decodes all prompts once, in the round of that number, and notes answers, latencies and stats in the trial."""


class Load:
    """Prompts, and the ways to decode many of them; greedy.

    Args:
        models: `plain` is transformers' own, this library's methods run on `packed` if there is one.
        prompts: ids of each.
        settings: how many tokens, and whether past the end of the text.
        pad: id that rows of a batch are filled up with.
    """

    def __init__(self, models: Models, prompts: Sequence[list[int]], settings: Settings, pad: int) -> None:
        self._plain: Any = models.plain
        self._own: Any = models.packed or models.plain
        self._prompts, self._settings, self._pad = list(prompts), settings, pad
        limits = {"max_new_tokens": settings.max_new_tokens, "pad_token_id": pad}
        self._arguments = {**generate_arguments(settings), **limits}
        ends = None if settings.ignore_eos else models.plain.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])

    def batches(self, rows: int) -> list[Trial]:
        """All prompts, that many at a time; transformers' own batches are the reference."""
        return self._measure(
            {
                REFERENCE: lambda trial, _: self._in_batches(trial, rows, self._plain, None),
                "batches, plain": lambda trial, _: self._in_batches(trial, rows, self._own, PLAIN),
                "batches, adaptive": lambda trial, _: self._in_batches(trial, rows, self._own, LookaheadConfig()),
                **self._engines(rows, None),
            }
        )

    def arrivals(self, rows: int, rate: float) -> list[Trial]:
        """Requests that arrive at random, `rate` a second; `model.generate`, one after the other, is the reference."""

        def times(number: int) -> list[float]:
            draw = random.Random(number)
            return [0.0, *accumulate(draw.expovariate(rate) for _ in self._prompts[1:])]

        arms: dict[str, Arm] = {REFERENCE: lambda trial, number: self._one_by_one(trial, times(number))}
        return self._measure(arms | self._engines(rows, times))

    def _engines(self, rows: int, times: Callable[[int], list[float]] | None) -> dict[str, Arm]:
        """One arm has one memory for all prompts of a round; it begins empty."""
        configs: dict[str, Callable[[], LookaheadConfig]] = {
            "engine, plain": lambda: PLAIN,
            "engine, adaptive": LookaheadConfig,
            "engine, adaptive-warm": lambda: LookaheadConfig(memory=Memory()),
        }

        def arm(make: Callable[[], LookaheadConfig]) -> Arm:
            return lambda trial, number: self._in_engine(trial, rows, make(), None if times is None else times(number))

        return {name: arm(make) for name, make in configs.items()}

    def _measure(self, arms: dict[str, Arm]) -> list[Trial]:
        """Every round runs all arms, each round another one first; before, each runs once for warmth."""
        trials = [Trial(name) for name in arms]
        for name, arm in arms.items():
            arm(Trial(name), 0)  # step costs are measured
        for number in range(self._settings.repeats):
            first = number % len(trials)
            for trial in trials[first:] + trials[:first]:
                start = perf_counter()
                arms[trial.name](trial, number)
                trial.seconds.append(perf_counter() - start)
        judge = Judge(self._plain, self._settings, REFERENCE)
        for trial in trials[1:]:
            self._compare(trial, trials[0], judge)
        return trials

    def _compare(self, trial: Trial, reference: Trial, judge: Judge) -> None:
        pairs = zip(self._prompts, reference.answers, trial.answers, strict=True)
        for number, (prompt, expected, found) in enumerate(pairs):
            place = Place("", str(number), turn=0, seed=0, repeat=0)
            mismatch = judge.compare(place, trial.name, prompt, expected, found)
            trial.parting += mismatch is not None
            trial.faults += mismatch is not None and not mismatch.near_tie

    def _in_batches(self, trial: Trial, rows: int, model: Any, lookahead: LookaheadConfig | None) -> None:
        trial.answers, stats = [], Stats()
        own: dict[str, Any] = {} if lookahead is None else {"lookahead": lookahead, "stats": stats}
        for first in range(0, len(self._prompts), rows):
            inputs = self._padded(self._prompts[first : first + rows])
            with original_generate(model) as original:
                call: Any = original if lookahead is None else lambda **given: generate(model, **given)
                output = call(**inputs, **self._arguments, **own)
            trial.answers += map(self._cut, output[:, inputs["input_ids"].shape[1] :].tolist())
        trial.stats = None if lookahead is None else stats

    def _in_engine(self, trial: Trial, rows: int, config: LookaheadConfig, times: list[float] | None) -> None:
        stats, ends, handles = Stats(), [0.0] * len(self._prompts), []
        with Engine(self._own, max_rows=rows, max_waiting=len(self._prompts)) as engine:
            start = perf_counter()
            for number, ids in enumerate(self._prompts):
                if times is not None:
                    sleep(max(0.0, times[number] - (perf_counter() - start)))

                def note(step: Step, number: int = number) -> None:
                    ends[number] = perf_counter() - start

                handles.append(engine.add(ids, lookahead=config, stats=stats, on_step=note, **self._arguments))
            outputs = [handle.result() for handle in handles]
        trial.answers = [out[0, len(ids) :].tolist() for out, ids in zip(outputs, self._prompts, strict=True)]
        trial.stats = stats
        if times is not None:
            trial.latencies += [end - time for end, time in zip(ends, times, strict=True)]

    def _one_by_one(self, trial: Trial, times: list[float]) -> None:
        trial.answers, start = [], perf_counter()
        for ids, time in zip(self._prompts, times, strict=True):
            sleep(max(0.0, time - (perf_counter() - start)))
            with original_generate(self._plain) as generate:
                output: Any = generate(**inputs_of(ids, self._plain), **self._arguments)
            trial.answers.append(output[0, len(ids) :].tolist())
            trial.latencies.append(perf_counter() - start - time)

    def _padded(self, prompts: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        """Ids and mask of a batch, `[B, L]`, padded on the left."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(each)) + each for each in prompts])
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
        return {"input_ids": ids.to(self._plain.device), "attention_mask": mask.to(self._plain.device)}

    def _cut(self, row: list[int]) -> list[int]:
        """An answer without the padding after its end."""
        return row[: next((place for place, token in enumerate(row, start=1) if token in self._ends), len(row))]
