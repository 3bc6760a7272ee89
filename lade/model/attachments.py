"""What hangs on a model's modules beside their own code, and sees the tensors of a pass, or changes them; wrappers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lade.model import thread_hooks
from lade.model.facts import ModelFacts

_IDLE_HOOKS = frozenset({"transformers.utils.output_capturing", thread_hooks.__name__})
"""Modules whose hooks do nothing here: transformers' stay on a model once it has returned hidden states, and ours are
those of other threads."""
GIVE_INSIDE = "give the model inside, its .module"


def wraps_model(model: Any) -> bool:
    """Whether it is a wrapper that shares a model's training over processes, such as DistributedDataParallel."""
    inside = getattr(model, "_modules", {}).get("module", None) if isinstance(model, nn.Module) else None
    return isinstance(inside, PreTrainedModel) or type(model).__module__.startswith("torch.distributed.fsdp.fully")


def attached(facts: ModelFacts) -> str:
    """The reason why a pass is not the modules' own work alone, as a replay of what was captured would miss it.

    Returns:
        Empty if nothing is known.
    """
    if any("forward" in vars(module) for module in facts.replaced):
        return "the forward of a module was replaced, and a replay would not call it"
    called = [
        hook
        for module in facts.hooked
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    if facts.having("_hf_hook") or any(getattr(hook, "__module__", "") not in _IDLE_HOOKS for hook in called):
        return "its modules have hooks, which a replay would not call"
    if any(kind.__module__.partition(".")[0] == "peft" for kind in facts.kinds):
        return "its adapters can be switched from call to call"
    return ""
