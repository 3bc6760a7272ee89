"""Construct the drafter of a config."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lade.config import LookaheadConfig
from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.decoding.drafting.controller import BatchBudget, Controller, ControllerState
from lade.decoding.drafting.drafter import Constraint, Drafter, Source
from lade.decoding.drafting.lookahead import LookaheadDrafter
from lade.decoding.drafting.memory import ContextMemory
from lade.decoding.drafting.mtp_tree import MtpWeights
from lade.decoding.drafting.tree_size import LARGEST, Budget, FixedBudget, PassCost


def reads_logits(config: LookaheadConfig, budget: BatchBudget | None) -> bool:
    """Return whether rows learn from the logits of their prompts.

    Rows with tree sizes of their own do, and rows whose memory outlives them; in a batch the shared budget decides.
    """
    return budget is None or config.budget is not None or config.memory is not None or budget.reads_logits


def drafter_for(
    config: LookaheadConfig,
    excluded: Collection[int] = (),
    *,
    vocabulary: int | None = None,
    cost: PassCost | None = None,
    budget: Budget | None = None,
    state: ControllerState | None = None,
    most: int = LARGEST,
    sources: Sequence[Source] = (),
    constraint: Constraint | None = None,
    read_logits: bool = True,
    mtp: MtpWeights | None = None,
) -> Drafter:
    """Return a drafter for one row.

    Args:
        config: the paper's method, or the adaptive one.
        excluded: ids after which nothing is drafted (EOS, padding).
        vocabulary: V; ids below it can be fed. None for no limit.
        cost: cost of a forward pass by size, which the adaptive method needs to choose tree sizes.
        budget: budget shared with other rows; None for an own one.
        state: what earlier texts have taught an own budget; None for nothing.
        most: maximum number of tokens fed per step by an own budget.
        sources: sources of guesses besides the method's own.
        constraint: forced and forbidden tokens; None for none.
        read_logits: learn from the logits of the prompt, if the config enables prompt n-grams.
        mtp: weights of an MTP layer's predictions for the adaptive method; None without a layer.

    Raises:
        ValueError: the adaptive method has neither a budget nor a cost.
    """
    if not config.adaptive:
        return LookaheadDrafter(config, excluded, sources, constraint)
    memory = ContextMemory() if config.memory is None else config.memory
    assert isinstance(memory, ContextMemory)  # there is no other kind
    if budget is None and config.budget is not None:
        budget = FixedBudget(config.budget)
    if budget is None and cost is not None:
        budget = Controller(cost, state, most)
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
