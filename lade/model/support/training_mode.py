"""Models in training mode: do their passes draw random numbers, and does one continue from the cache of another?

Dropout comes in many forms: modules, calls of a function, dropped layers, jitter in a router; and some are on only
where the module that holds them is in training mode, whatever the mode of the model as a whole. So names prove nothing:
three passes over two or three tokens are tried, whenever any module is in training mode. Random numbers count even
where no dropout uses them: a sample after fewer passes would be another one.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from lade.model.facts import ModelFacts
from lade.model.kv_cache import TreeCache
from lade.model.randomness import RandomModelError, without_draws
from lade.model.recurrent.cores import is_recurrent
from lade.model.recurrent.layer import layers_for
from lade.model.runner import input_device
from lade.model.signature import cache_name
from lade.model.support.tree_check import distance, tolerance

REMEDY = "call model.eval()"


def why_not_in_training(facts: ModelFacts) -> str:
    """What training mode does to the passes of a model; empty if nothing, or if no module is in training mode."""
    if not facts.training:
        return ""
    model: PreTrainedModel = facts.model
    if model.config.is_encoder_decoder:
        return f"it is in training mode, and its passes are not tried: {REMEDY}"
    try:
        error = without_draws(lambda: _error_of_cache(model))
    except RandomModelError:
        return f"it is in training mode, where it draws random numbers, such as dropout's: {REMEDY}"
    except Exception as problem:  # noqa: BLE001 - whatever keeps a pass in training mode from working is the reason
        return f"it is in training mode, where a pass fails ({_first_line(problem)}): {REMEDY}"
    if not error <= tolerance(model):
        return (
            "it is in training mode, where a pass does not continue from the cache of the one before, "
            f"as with gradient checkpointing: {REMEDY}"
        )
    return ""


@torch.no_grad()
def _error_of_cache(model: Any) -> float:
    """How far a token fed after two others is from the same token fed together with them.

    On recurrent layers that may be another function, so only what their cache holds counts.
    """
    ids = torch.arange(3, device=input_device(model))[None]
    cache, recurrent = TreeCache(), is_recurrent(model)
    cache.layers += layers_for(model.config) if recurrent else []
    kwargs: dict[str, Any] = {cache_name(model) or "past_key_values": cache, "use_cache": True, "return_dict": True}
    model(input_ids=ids[:, :2], **kwargs)
    last = model(input_ids=ids[:, 2:], **kwargs).logits[0, -1]
    cache.count(1, 3)
    if not all(layer.lengths == [3] for layer in cache.attending):
        return float("inf")
    if recurrent:
        return 0.0 if all(layer.state_bytes for layer in cache.recurrent) else float("inf")
    return distance(model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1], last)


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0]
