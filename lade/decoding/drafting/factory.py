"""Which drafter a config asks for."""

from __future__ import annotations

from collections.abc import Collection

from lade.config import LookaheadConfig
from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.drafting.lookahead import LookaheadDrafter
from lade.decoding.drafting.memory import Memory
from lade.decoding.drafting.tree_size import Budget, Controller, FixedBudget, StepCost


def drafter_for(
    config: LookaheadConfig,
    excluded: Collection[int] = (),
    *,
    vocabulary: int | None = None,
    cost: StepCost | None = None,
    budget: Budget | None = None,
) -> Drafter:
    """A drafter for one row.

    Args:
        config: the paper's method, or the adaptive one.
        excluded: ids behind which nothing is to be guessed (end of sequence, padding).
        vocabulary: ids below it can be fed; None for no limit.
        cost: of a pass; needed where the adaptive method has no fixed budget.
        budget: that several rows share, if they do.

    Raises:
        ValueError: there is neither a budget nor a cost to choose one by.
    """
    if not config.adaptive:
        return LookaheadDrafter(config, excluded)
    memory = Memory() if config.memory is None else config.memory
    assert isinstance(memory, Memory)  # the config has seen to it
    return AdaptiveDrafter(
        memory,
        _budget(config, cost) if budget is None else budget,
        excluded,
        vocabulary=vocabulary,
        read_prompts=config.prompt_ngrams,
        seed=config.seed,
    )


def _budget(config: LookaheadConfig, cost: StepCost | None) -> Budget:
    if config.budget is not None:
        return FixedBudget(config.budget)
    if cost is None:
        raise ValueError("the adaptive method needs the cost of a pass, or a budget: give LookaheadConfig(budget=...)")
    return Controller(cost)
