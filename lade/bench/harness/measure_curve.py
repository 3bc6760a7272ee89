"""Measures what a forward pass takes by the tokens it feeds, on the weights that a benchmark uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from lade.backends.runners import local_runner_for
from lade.bench.results import StepCurve
from lade.model.support.supports import supports
from lade.tuning.measure import SIZES, StepTimer, samples_of

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
    runner = local_runner_for(model, plan, model.generation_config)
    embeddings: Any = model.get_input_embeddings()
    timer = StepTimer(runner, vocabulary=embeddings.weight.shape[0], largest=max(sizes), cached=cached)
    samples: dict[int, list[float]] = {}
    feasible = [size for size in sizes if size <= timer.largest]
    for size, seconds in samples_of(timer, feasible, budget_s=budget_s, rounds=ROUNDS):
        samples.setdefault(size, []).append(seconds)
    found = sorted(samples)
    # The first pass of a size warms up, and counts only where there is no other.
    return StepCurve(packed, timer.cached, found, [samples[size][1:] or samples[size] for size in found])
