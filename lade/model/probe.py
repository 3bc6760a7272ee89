"""Trust, but check: one small comparison of a tree pass with plain passes, for architectures nobody has tried yet."""

from __future__ import annotations

import logging
from typing import Any

import torch
from transformers import PreTrainedModel

from lade.decoding.tree import ROOT, TokenTree
from lade.model.attention import MaskPlan
from lade.model.cache import TreeCache
from lade.model.runner import EagerRunner, input_device

logger = logging.getLogger(__name__)

PREFIX_TOKENS = 12
BRANCHES = ((0, 1, 2), (3, 4, 5), (3, 6))  # indices into random tokens; two of them share a node
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}  # of the logits' standard deviation; wrong masks miss by 0.1 up
HALF_TOLERANCE = 0.1


@torch.no_grad()
def worst_error(model: PreTrainedModel, plan: MaskPlan, beyond: int = 0) -> float:
    """Largest difference between a tree's logits and those of plain passes over its branches.

    The accepted path is kept and one more token is fed, so that compaction is checked too.

    Args:
        model: any causal language model.
        plan: the masks to try.
        beyond: length of a sliding window or chunk: the prefix is made longer than that.

    Returns:
        The difference in standard deviations of the plain logits.
    """
    logger.info("checking %s, which is not a tested architecture: a tree pass against plain ones", type(model).__name__)
    generator = torch.Generator().manual_seed(0)
    embeddings: Any = model.get_input_embeddings()
    vocabulary: int = embeddings.weight.shape[0]
    prefix_length = PREFIX_TOKENS + beyond
    prefix: list[int] = torch.randint(vocabulary, (prefix_length,), generator=generator).tolist()
    extra: list[int] = torch.randperm(vocabulary, generator=generator)[:8].tolist()  # distinct: branches stay apart

    runner = EagerRunner(model, plan, model.generation_config)
    cache = TreeCache()
    runner.prefill([prefix[:-1]], cache)
    tree = TokenTree(prefix[-1])
    for branch in BRANCHES:
        tree.add_path([extra[i] for i in branch], "pool")
    logits = runner.forward([tree], [prefix], cache)[0]  # [S, V]
    errors = [_distance(model, prefix, tree, node, logits[node]) for node in range(len(tree))]

    path = [ROOT, 4, 5]  # the second branch: its keys must move forward
    cache.keep([path], fed=len(tree))
    text = prefix + [tree.ids[node] for node in path[1:]]
    follow = TokenTree(extra[7])
    logits = runner.forward([follow], [[*text, extra[7]]], cache)[0]
    errors.append(_distance(model, [*text, extra[7]], follow, ROOT, logits[ROOT]))
    logger.debug("the logits of %s differ by %.2g standard deviations at most", type(model).__name__, max(errors))
    return max(errors)


def tolerance(dtype: torch.dtype) -> float:
    """Greatest `worst_error` that rounding explains."""
    return TOLERANCE.get(dtype, HALF_TOLERANCE)


def _distance(model: PreTrainedModel, prefix: list[int], tree: TokenTree, node: int, logits: torch.Tensor) -> float:
    path = []
    while node != ROOT:
        path.append(tree.ids[node])
        node = tree.parents[node]
    ids = torch.tensor([prefix + path[::-1]], device=input_device(model))
    plain = model(ids, use_cache=False).logits[0, -1].to(logits.device)  # [V]
    if not torch.isfinite(logits).all():
        return float("inf")
    return float((plain - logits).abs().max() / plain.std())
