"""Making a model on a GPU batch-invariant, with trials; see `lade.invariant`."""

from __future__ import annotations

from typing import Any

import torch

from lade.backends.cpu.invariant.trials import ModelTrial, distinct_layers
from lade.backends.cpu.invariant_marker import Invariance, changed_modules, set_invariance
from lade.backends.cuda_graphs.fused import fusion_refusal
from lade.backends.cuda_graphs.pool import BufferPool
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.backends.trials.backend import LONGEST_PROBE_TOKENS
from lade.decoding.tree import TokenTree
from lade.model.config import window_lengths
from lade.model.facts import ModelFacts
from lade.model.inputs import MaskPlan
from lade.model.module_changes import restore
from lade.model.runner import EagerRunner
from lade.model.supports import supports

TEXTS = (5, 61, 125, 250)
"""Lengths of the texts of the trial; trees behind all but the first cross the border of a tile, two that of a span."""
PAST = 3
"""Tokens by which one more text exceeds each sliding window."""
TREES = (1, 14, 64)
"""Nodes of the trees that are also fed by captured passes."""


def refusal(model: Any) -> str:
    """Return why a model is not even tried; an empty string otherwise."""
    support = supports(model)
    if support.plan is None:
        return support.reason
    if model.config._attn_implementation != "sdpa":
        return f"its attention is {model.config._attn_implementation}: load it with attn_implementation='sdpa'"
    return fusion_refusal(ModelFacts.of(model), support.plan)


def make_invariant(model: Any, pool: BufferPool) -> str:
    """Make a model that is not refused invariant, in place; return why that failed, and leave the model unchanged then.

    The pool is that of its captured passes.
    """
    if pool.in_use:
        return "a generation or an engine uses it"
    try:
        change_layers(model)
        problem = _first_difference(model, supports(model).require(), pool)
    except BaseException:
        _undo(model)
        raise
    if problem:
        _undo(model)
    return problem


def change_layers(model: Any) -> None:
    """Replace the layers of a model, in place, and mark it; nothing is tried."""
    from lade.backends.cuda_graphs.invariant.layers import replace_layers

    with torch.inference_mode(False), torch.no_grad():
        replace_layers(model)
    facts = ModelFacts.of(model)
    attention, changed = model.config._attn_implementation, changed_modules(facts)
    set_invariance(model, Invariance(None, model.dtype, len(facts.modules), attention, None, changed))


def _undo(model: Any) -> None:
    restore(model)
    set_invariance(model, None)


def _first_difference(model: Any, plan: MaskPlan, pool: BufferPool) -> str:
    """Return what rounds a token differently in two passes; an empty string if nothing does."""
    with distinct_layers(model):
        for tokens in _texts(model.config):
            trial = ModelTrial(model, plan, tokens)
            differing = trial.first_mismatch() or (trial.first_batch_mismatch() if tokens == TEXTS[0] else None)
            if differing is not None:
                return f"{differing!r} is the first part that rounds a token differently beside other tokens"
        for nodes in TREES:
            if not _captured_equals_eager(model, plan, pool, nodes):
                return f"a captured pass of {nodes} tokens rounds differently from one that is not captured"
    return ""


def _texts(config: Any) -> list[int]:
    windows = [window for window in window_lengths(config) if window <= LONGEST_PROBE_TOKENS]
    found = sorted({*TEXTS, *(window + PAST for window in windows)})
    return [tokens for tokens in found if tokens + 3 * PAST <= config.max_position_embeddings]


def _captured_equals_eager(model: Any, plan: MaskPlan, pool: BufferPool, nodes: int) -> bool:
    text = [number % 100 for number in range(TEXTS[1])]
    tree = TokenTree(text[-1])
    for first in range(0, nodes - 1, 3):
        tree.add_path([(first + depth) % 100 for depth in range(min(3, nodes - 1 - first))], "pool")
    runners = EagerRunner(model, plan, model.generation_config), GraphRunner(model, plan, model.generation_config, pool)
    found = []
    for runner in runners:
        cache: Any = runner.new_cache(tokens=2 * TEXTS[1] + nodes)
        runner.prefill([text[:-1]], cache)
        found.append(runner.forward([tree], [text], cache).clone())
        cache.reset()
    pool.free_idle()
    return torch.equal(*found)
