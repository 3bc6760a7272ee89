"""Trust, but check: whether what stands behind a token reaches it, on a model that no test vouches for.

Attention over a prompt may look both ways, as PaliGemma's does, while what is decoded looks back alone. Then prompts of
several lengths cannot be padded behind, and go in passes of their own.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner
from lade.model.support.tree_check import distance, tolerance
from lade.model.token_embeddings import token_embeddings

LENGTHS = 12, 5

logger = logging.getLogger(__name__)


@torch.no_grad()
def can_be_padded(model: PreTrainedModel, plan: MaskPlan) -> bool:
    """Whether prompts may be padded behind: the logits of one that is, are those that it has alone.

    Args:
        model: one that can be served.
        plan: how it takes its masks.
    """
    if model.config.is_encoder_decoder:
        return False  # its decoder begins with a token or two
    runner = EagerRunner(model, replace(plan, pads=True), model.generation_config)
    if not runner.pads:
        return False
    generator = torch.Generator().manual_seed(1)
    vocabulary: int = token_embeddings(model).weight.shape[0]
    prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    try:
        logits = runner.prefill(prompts, TreeCache())[-1]
    except Exception as problem:  # noqa: BLE001 - any failure of an unknown model on it is the reason not to do so
        logger.debug("prompts of %s cannot be padded: %s: %s", type(model).__name__, type(problem).__name__, problem)
        return False
    return distance(runner.prefill(prompts[-1:], TreeCache())[0], logits) <= tolerance(model)
