"""What hangs on a model's modules beside their own code, and sees the tensors of a pass, or changes them."""

from __future__ import annotations

from lade.model import thread_hooks
from lade.model.facts import ModelFacts

_IDLE_HOOKS = frozenset({"transformers.utils.output_capturing", thread_hooks.__name__})
"""Modules whose hooks do nothing here: transformers' stay on a model once it has returned hidden states, and ours are
those of other threads."""


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
