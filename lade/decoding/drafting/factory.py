"""Construct the drafter of a config."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lade.config import LookaheadConfig
from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.decoding.drafting.controller import Budget, Controller, FixedBudget
from lade.decoding.drafting.drafter import Constraint, Drafter, Source
from lade.decoding.drafting.lookahead import LookaheadDrafter
from lade.decoding.drafting.memory import ContextMemory, MtpWeights


def reads_logits(config: LookaheadConfig, budget: Controller | None) -> bool:
    """Return whether rows learn from the logits of their prompts.

    Rows of a fixed size do, and rows whose memory outlives them; otherwise the budget of their batch decides.
    """
    return budget is None or config.budget is not None or config.memory is not None or budget.reads_logits


def drafter_for(
    config: LookaheadConfig,
    excluded: Collection[int] = (),
    *,
    vocabulary: int | None = None,
    budget: Budget | None = None,
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
        budget: decides on the tree sizes of the adaptive method; the config's own takes precedence.
        sources: sources of guesses besides the method's own.
        constraint: forced and forbidden tokens; None for none.
        read_logits: learn from the logits of the prompt, if the config enables prompt n-grams.
        mtp: weights of an MTP layer's predictions for the adaptive method; None without a layer.

    Raises:
        ValueError: the adaptive method has no budget.
    """
    if config.method.name == "lookahead":
        return LookaheadDrafter(config, excluded, sources, constraint)
    memory = ContextMemory() if config.memory is None else config.memory
    assert isinstance(memory, ContextMemory)  # there is no other kind
    if config.budget is not None:
        budget = FixedBudget(config.budget)
    if budget is None:
        raise ValueError("the adaptive method needs a budget: give one, or LookaheadConfig(budget=...)")
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
