"""The drafter that a config means."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lade.config import LookaheadConfig
from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.decoding.drafting.controller import LARGEST, BatchBudget, Controller, ControllerState
from lade.decoding.drafting.drafter import Constraint, Drafter, Source
from lade.decoding.drafting.lookahead import LookaheadDrafter
from lade.decoding.drafting.memory import ContextMemory
from lade.decoding.drafting.mtp_tree import MtpWeights
from lade.decoding.drafting.tree_size import Budget, FixedBudget, PassCost


def reads_logits(config: LookaheadConfig, budget: BatchBudget | None) -> bool:
    """Whether rows that share a budget are to learn from the logits of their prompts.

    A row of a size of its own does, and one whose memory outlasts it, since others may look into that more often.
    """
    return budget is None or config.budget is not None or config.memory is not None or budget.reads_logits


def drafter_for(
    config: LookaheadConfig,
    excluded: Collection[int] = (),
    *,
    vocabulary: int | None = None,
    cost: PassCost | None = None,
    budget: Budget | None = None,
    habits: ControllerState | None = None,
    most: int = LARGEST,
    sources: Sequence[Source] = (),
    constraint: Constraint | None = None,
    read_logits: bool = True,
    mtp: MtpWeights | None = None,
) -> Drafter:
    """A drafter for one row.

    Args:
        config: the paper's method, or the adaptive one.
        excluded: ids after which nothing is guessed (end of sequence, padding).
        vocabulary: ids below it can be fed; None for no limit.
        cost: what a forward pass costs; the adaptive method needs it if it has no budget.
        budget: shared with other rows; None for one of its own.
        habits: of a budget of its own, learned from earlier texts; None for none.
        most: tokens fed per step at most, by a budget of its own that goes by the cost.
        sources: guesses beside the method's own.
        constraint: what must follow, and what cannot.
        read_logits: whether to learn from the logits of its prompt, if the config has it learn from prompts.
        mtp: weights of an MTP layer's predictions, which the adaptive method mixes in; None where there is no layer.

    Raises:
        ValueError: the adaptive method has neither a budget nor a cost to choose one by.
    """
    if not config.adaptive:
        return LookaheadDrafter(config, excluded, sources, constraint)
    memory = ContextMemory() if config.memory is None else config.memory
    assert isinstance(memory, ContextMemory)  # there is no other kind
    if budget is None and config.budget is not None:
        budget = FixedBudget(config.budget)
    if budget is None and cost is not None:
        budget = Controller(cost, habits, most)
    if budget is None:
        raise ValueError("the adaptive method needs the cost of a pass, or a budget: give LookaheadConfig(budget=...)")
    return AdaptiveDrafter(
        memory,
        budget,
        excluded,
        vocabulary=vocabulary,
        read_prompts=config.prompt_ngrams,
        read_logits=read_logits,
        sources=sources,
        constraint=constraint,
        seed=config.seed,
        mtp=mtp,
    )
