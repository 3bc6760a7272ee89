"""The benchmark loop: all methods answer each prompt in turn, and their answers are compared.

A memory is saved before results.json has the prompt that it has learned last, under the number of prompts done by then;
the older one is removed afterwards. So there is one that fits results.json whenever the process ends.

    for each repeat, each seed, each workload                  a series: kept memories begin empty
        for each prompt                                        results.json is written
            for each turn of it
                each method answers, another one first each time
                the answers are compared with the reference's

So a drift of the machine's speed meets all methods alike. The second turn of a conversation is answered after the
reference's answer to the first: all methods get the same prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from transformers import PreTrainedModel

from lade.errors import InputError, UnsupportedError
from lade.memory import Memory
from lade.model.facts import ModelFacts
from lade.model.runner import runner_for
from lade.model.supports import supports
from lade.tuning.cost_cache import SIZES, StepTimer, samples_of
from lade_lab.harness.arms import Arm, Completion, Models, Place
from lade_lab.harness.methods import TRANSFORMERS
from lade_lab.harness.mismatch import Judge
from lade_lab.harness.prompts import Prompts
from lade_lab.results import Mismatch, Results, Sample, Settings, StepCurve
from lade_lab.workloads import Item, Workload

BUDGET_S = 2.0
ROUNDS = 15


def step_curve(
    model: PreTrainedModel, *, packed: bool, cached: int, sizes: Sequence[int] = SIZES, budget_s: float = BUDGET_S
) -> StepCurve | None:
    """Time passes of several sizes; None for a model that no tree can be fed to.

    Args:
        model: whose passes are timed.
        packed: whether its weights are; for the record.
        cached: tokens in the cache meanwhile.
        sizes: tokens fed, the most telling ones first: should the time be over early, the others are left out.
        budget_s: seconds for all of it, one pass of each of the first two sizes at least.
    """
    plan = supports(model).plan
    if plan is None:
        return None
    runner = runner_for(ModelFacts.of(model), plan, model.generation_config)
    embeddings: Any = model.get_input_embeddings()
    timer = StepTimer(runner, vocabulary=embeddings.weight.shape[0], largest=max(sizes), cached=cached)
    samples: dict[int, list[float]] = {}
    feasible = [size for size in sizes if size <= timer.largest]
    for size, seconds in samples_of(timer, feasible, budget_s=budget_s, rounds=ROUNDS):
        samples.setdefault(size, []).append(seconds)
    found = sorted(samples)
    # The first pass of a size warms up, and counts only where there is no other.
    return StepCurve(packed, timer.cached, found, [samples[size][1:] or samples[size] for size in found])


class KeptMemories:
    """See above.

    Args:
        arms: of which those with a memory are looked after.
        folder: where to save; None: nothing is saved.
        tokenizer: of the model; the files are tied to it.
    """

    def __init__(self, arms: Sequence[Arm], folder: Path | None, tokenizer: Any) -> None:
        self._arms = [arm for arm in arms if arm.memory is not None]
        self._folder, self._tokenizer = folder, tokenizer
        self._at: int | None = None

    def open(self, done: int, *, fresh: bool) -> None:
        """Have the memories be what they were after the first `done` prompts.

        Args:
            done: number of prompts.
            fresh: whether the next one begins a series, for which memories are empty.

        Raises:
            InputError: they were never saved.
        """
        at, self._at = self._at, None  # until the prompt is done they are neither the old ones nor the new ones
        if not fresh and at == done:
            return
        for arm in self._arms:
            arm.memory = Memory() if fresh else self._load(arm, done)

    def close(self, done: int) -> None:
        """Save them as they are after the first `done` prompts."""
        self._at = done
        for arm in self._arms:
            if arm.memory is not None and self._folder is not None:
                arm.memory.save(self._path(arm, done), self._tokenizer)

    def remove(self, done: int) -> None:
        """Remove what was saved after the first `done` prompts."""
        for arm in self._arms:
            if self._folder is not None:
                self._path(arm, done).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all that was saved: the run is complete."""
        for arm in self._arms:
            for file in [] if self._folder is None else self._folder.glob(self._path(arm, "*").name):
                file.unlink()

    def _path(self, arm: Arm, done: int | str) -> Path:
        assert self._folder is not None
        return self._folder / f"{arm.method.name.replace(' ', '-')}.{done}.memory"

    def _load(self, arm: Arm, done: int) -> Memory:
        if self._folder is None or not self._path(arm, done).is_file():
            name = arm.method.name
            raise InputError(f"the memory of {name} after {done} prompts is missing: start over with another --out")
        return Memory.load(self._path(arm, done), self._tokenizer)


WARM_UP_TOKENS = 24


@dataclass(frozen=True)
class Job:
    """A prompt for all methods.

    Attributes:
        workload: its name.
        item: the prompt, or conversation.
        seed, repeat: which of them.
        first: whether it begins a series.
    """

    workload: str
    item: Item
    seed: int
    repeat: int
    first: bool

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Key shared by its samples."""
        return self.workload, self.item.id, self.seed, self.repeat

    def is_of(self, sample: Sample) -> bool:
        """Return whether a sample answers this prompt."""
        return self.key == (sample.workload, sample.prompt, sample.seed, sample.repeat)


@dataclass
class Outcome:
    """Records of all methods for one job."""

    samples: list[Sample]
    mismatches: list[Mismatch]


class Experiment:
    """Iterate over it for the number of prompts done; each is in `results`, and in its file, by then.

    Interrupt it wherever you like: prompts that not all methods have answered are dropped, nothing else is.

    Args:
        arms: the methods.
        workloads: the prompts.
        models: for step curves, and for comparing scores.
        tokenizer: of the model.
        results: the record with its settings, and with what an earlier run found; it is filled.
        path: where it is written after each prompt; None: nowhere.

    Attributes:
        results: what has been found so far.
        jobs: all prompts, in order.
        done: how many of them are done.
        outgrowing: how many items may outgrow the model's context with their answers.

    Raises:
        InputError: the model cannot continue a prompt, or the results are not of these prompts.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        workloads: Sequence[Workload],
        models: Models,
        tokenizer: Any,
        results: Results,
        path: Path | None = None,
    ) -> None:
        self.results, self._arms, self._models, self._tokenizer = results, list(arms), models, tokenizer
        self.jobs = jobs_of(workloads, results.settings)
        self._prompts = Prompts(tokenizer, models.plain)
        self.outgrowing = self._prompts.check_room(
            [item for workload in workloads for item in workload.items], results.settings.max_new_tokens
        )
        self._judge = Judge(models.plain, results.settings, results.reference)
        self._path = path
        self._kept = KeptMemories(arms, None if path is None else path.parent, tokenizer)
        self._seconds_a_turn = 0.0
        self.done = self._answered()

    @property
    def seconds_left(self) -> float:
        """About how long it will take, as far as the warm-up tells."""
        return self._seconds_a_turn * sum(len(job.item.turns) for job in self.jobs[self.done :])

    def warm_up(self) -> None:
        """Have each method begin an answer that is not recorded, and measure what a pass costs.

        Raises:
            UnsupportedError: a method cannot be run with this model.
        """
        if self.done == len(self.jobs):
            return
        prompt, settings = self._prompts.ids(self.jobs[0].item), self.results.settings
        self._seconds_a_turn = 0.0
        for arm in self._arms:
            completion = self._begin(arm, prompt, min(WARM_UP_TOKENS, settings.max_new_tokens))
            stats = completion.stats
            token_s = stats.decode_s / max(1, stats.new_tokens - 1)
            self._seconds_a_turn += stats.prefill_s + token_s * settings.max_new_tokens
        if not self.results.step_curves:
            self.results.step_curves = self._step_curves()
            self._save()

    def __iter__(self) -> Iterator[int]:
        """Run what is left to do."""
        while self.done < len(self.jobs):
            job = self.jobs[self.done]
            self._kept.open(self.done, fresh=job.first)
            outcome = self._run(job)
            self._kept.close(self.done + 1)
            self._take(outcome)
            self._kept.remove(self.done - 1)
            yield self.done
        self.results.complete = True
        self._save()
        self._kept.clear()

    def _begin(self, arm: Arm, prompt: list[int], new_tokens: int) -> Completion:
        try:
            return arm.complete(prompt, self.results.settings.seeds[0], new_tokens)
        except (ValueError, TypeError, AttributeError, RuntimeError) as problem:
            name = arm.method.name
            if arm.method.kind in TRANSFORMERS:  # whatever transformers makes of a model it cannot assist
                raise UnsupportedError(
                    f"{name} fails with this model ({problem})", f"leave {name} out of the methods"
                ) from problem
            raise

    def _run(self, job: Job) -> Outcome:
        outcome, answers = Outcome([], []), list[list[int]]()
        for turn in range(len(job.item.turns)):
            place = Place(job.workload, job.item.id, turn, job.seed, job.repeat)
            prompt = self._prompts.ids(job.item, answers)
            completions = {
                arm.method.name: arm.complete(prompt, job.seed, self.results.settings.max_new_tokens)
                for arm in self._order(self.done + turn)
            }
            answers.append(completions[self.results.reference].tokens)
            for arm in self._arms:
                name = arm.method.name
                outcome.samples.append(completions[name].sample(place, name, prompt))
                if arm.method.compared:
                    found = self._judge.compare(place, name, prompt, answers[-1], completions[name].tokens)
                    outcome.mismatches += [] if found is None else [found]
        return outcome

    def _order(self, number: int) -> list[Arm]:
        """All of them, another one first each time."""
        start = number % len(self._arms)
        return self._arms[start:] + self._arms[:start]

    def _step_curves(self) -> list[StepCurve]:
        """Measure the step curves of plain and packed weights, in the middle of an answer to a median prompt."""
        lengths = [len(self._prompts.ids(job.item)) for job in self.jobs]
        cached = round(median(lengths)) + self.results.settings.max_new_tokens // 2
        weights = [(False, self._models.plain), (True, self._models.packed)]
        curves = [step_curve(model, packed=packed, cached=cached) for packed, model in weights if model is not None]
        return [curve for curve in curves if curve is not None]

    def _take(self, outcome: Outcome) -> None:
        self.results.samples += outcome.samples
        self.results.mismatches += outcome.mismatches
        self.done += 1
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            self.results.save(self._path)

    def _answered(self) -> int:
        """Return the number of prompts that the samples of an earlier run answer, in prompt order."""
        done, place, samples = 0, 0, self.results.samples
        while place < len(samples):
            job = self.jobs[done] if done < len(self.jobs) else None
            size = len(self._arms) * len(job.item.turns) if job else 0
            found = samples[place : place + size]
            if job is None or len(found) < size or not all(map(job.is_of, found)):
                problem = f"sample {place + 1} is none of the prompt that comes next"
                raise InputError(
                    f"the results in {str(self._path)!r} do not fit this run ({problem}): give another --out"
                )
            done, place = done + 1, place + size
        return done


def jobs_of(workloads: Sequence[Workload], settings: Settings) -> list[Job]:
    """All prompts in the order in which they are run."""
    return [
        Job(workload.record.name, item, seed, repeat, number == 0)
        for repeat in range(settings.repeats)
        for seed in settings.seeds
        for workload in workloads
        for number, item in enumerate(workload.items)
    ]
