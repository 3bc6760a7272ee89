"""Causality checks: whether padding on the right or left affects the tokens of a text.

Attention over a prompt may be bidirectional, as in PaliGemma, while generated tokens look back only. Then prompts of
several lengths cannot be padded on the right, and need separate passes.

Rows are fed here without their left padding, so the output is exact only if plain decoding ignores the padding in both
positions and masks. Transformers ensures that, unless a class prepares its inputs differently, or has a biased
projection before a convolution: then padded columns enter the first windows.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PreTrainedModel

from lade.model.config import token_embeddings
from lade.model.facts import cache_name
from lade.model.kv_cache import TreeCache
from lade.model.masks import MaskPlan
from lade.model.runner import EagerRunner, input_device
from lade.model.support.tree_check import distance, tolerance

LENGTHS = 12, 5

logger = logging.getLogger(__name__)


@torch.no_grad()
def can_be_padded(model: PreTrainedModel, plan: MaskPlan) -> bool:
    """Return whether prompts may be padded on the right: a padded prompt has the same logits as alone.

    Args:
        model: a model that `lade.supports`.
        plan: the model's mask format.
    """
    if model.config.is_encoder_decoder:
        return False  # its decoder prompts are one or two tokens
    runner = EagerRunner(model, replace(plan, pads=True), model.generation_config)
    if not runner.pads:
        return False
    generator = torch.Generator().manual_seed(1)
    vocabulary: int = token_embeddings(model).weight.shape[0]
    prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    try:
        logits = runner.prefill(prompts, TreeCache())[-1]
    except Exception as problem:  # noqa: BLE001 - any failure of an unknown model rules padding out
        logger.debug("prompts of %s cannot be padded: %s: %s", type(model).__name__, type(problem).__name__, problem)
        return False
    return distance(runner.prefill(prompts[-1:], TreeCache())[0], logits) <= tolerance(model)


TOKENS, PADDING = 12, 5

_known: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def depends_on_padding(model: PreTrainedModel) -> bool:
    """Return whether left padding changes the output of plain decoding; tried once per model."""
    if model not in _known:
        _known[model] = _error_of_padding(model) > tolerance(model)
    return _known[model]


@torch.no_grad()
def _error_of_padding(model: PreTrainedModel) -> float:
    """Return how much padding changes the logits of two steps, in standard deviations."""
    embeddings: Any = model.get_input_embeddings()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(embeddings.weight.shape[0], (1, TOKENS + 1), generator=generator).to(input_device(model))
    alone = _last_two_logits(model, ids, torch.ones_like(ids))
    columns = ids.new_zeros(1, PADDING)
    padded = _last_two_logits(model, torch.cat([columns, ids], 1), torch.cat([columns, torch.ones_like(ids)], 1))
    if not torch.isfinite(padded).all():
        return float("inf")
    return float((padded - alone).abs().max() / alone.std())


def _last_two_logits(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the logits of the last two tokens, `[2, V]`, of ids `[1, L]`; the last is fed alone, as in `generate`."""
    cache = DynamicCache(config=model.config)
    name = cache_name(model) or "past_key_values"
    kwargs: dict[str, Any] = {"attention_mask": mask[:, :-1], name: cache, "use_cache": True}
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        kwargs["position_ids"] = model._prepare_position_ids_for_generation(ids[:, :-1], kwargs)
    first = model(**model.prepare_inputs_for_generation(ids[:, :-1], is_first_iteration=True, **kwargs))
    kwargs = model._update_model_kwargs_for_generation(first, kwargs, is_encoder_decoder=False)
    second = model(**model.prepare_inputs_for_generation(ids, next_sequence_length=1, **kwargs))
    return torch.stack([output.logits[0, -1] for output in (first, second)])
