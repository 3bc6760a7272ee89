"""Hooks, replaced forwards and adapters that prevent graph capture or inference mode.

A pass of a small model is made of hundreds of small operations, and takes 6 % less that way; the numbers are the same.
What comes of it are tensors that may not be written to outside of the mode, and that autograd refuses. Nobody but us
may be left with one of them. So

- logits are handed on as ordinary tensors, which share their memory;
- the cache allocates its buffers as ordinary tensors, see `TreeLayer`;
- models in which others might keep a tensor of a pass make their passes as ever: those with code from elsewhere, hooks,
  adapters or weights of a class of their own, recurrent layers, whose states are what a pass made them, and rotary
  frequencies or tables of positions that a pass may replace.

That is looked at when a generation begins, and a request of an engine: hooks that come later are given tensors of the
mode.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import dlpack
from transformers import PretrainedConfig, PreTrainedModel

from lade.model import joint, thread_patches
from lade.model.facts import ModelFacts
from lade.model.masks import MaskPlan

_IDLE_HOOKS = frozenset({"transformers.utils.output_capturing", thread_patches.__name__})
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
    if "peft" in {kind.__module__.partition(".")[0] for kind in facts.kinds}:
        return "its adapters can be switched from call to call"
    return ""


_KNOWN = frozenset({"torch", "transformers", "lade"})
"""Packages whose modules keep nothing of a pass."""


class PassMode:
    """The mode in which a model makes its passes.

    Args:
        facts: of the model's modules.
        plan: how it takes its masks; those of a class of our own cannot be cut in inference mode.
    """

    def __init__(self, facts: ModelFacts, plan: MaskPlan) -> None:
        self._mode: Callable[[], AbstractContextManager[object]] = _unrecorded
        if plan.compact or plan.placed or why_recorded(facts):
            self._mode = nullcontext

    def __call__(self, *patches: object) -> AbstractContextManager[object]:
        """To be entered for a pass, which these patch, if they are true of the model."""
        return nullcontext() if any(patches) else self._mode()


def _unrecorded() -> AbstractContextManager[object]:
    """Inference mode, unless autocast keeps weights that it has cast."""
    return nullcontext() if torch.is_autocast_enabled("cpu") else torch.inference_mode()


def why_recorded(facts: ModelFacts) -> str:
    """Why the passes of a model are not made in inference mode; empty if they are."""
    if {weight.device.type for weight in facts.weights} - {"cpu"}:
        return "it has been tried on CPUs alone"
    cpu = joint.loaded("cpu")
    ordinary_kinds = {nn.Parameter} if cpu is None else {nn.Parameter, cpu.packed_weight}
    if set(map(type, facts.weights)) - ordinary_kinds:
        return "its weights are of a class of their own"
    if {kind.__module__.partition(".")[0] for kind in facts.kinds} - _KNOWN:
        return "its modules are of other packages, and may keep what they are fed"
    if [thing for thing in facts.foreign if not isinstance(thing, PretrainedConfig)]:
        return "code from elsewhere takes part, and may keep what it is fed"
    if cpu is not None and any(issubclass(kind, cpu.int8_layer) for kind in facts.kinds):
        return "its layers go by versions to share what they round"
    if facts.compiled:
        return "its modules are compiled"
    if [kind for kind in facts.kinds if hasattr(kind, "make_weights")]:  # as in M2M100 and XGLM
        return "a pass may replace its table of positions"
    positions = facts.positions
    if positions.longrope_switch is not None or positions.dynamic is not None:
        return "a pass may replace its rotary frequencies"
    return attached(facts)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """One that shares the memory of what a pass gave, and that may be written to outside of inference mode."""
    if not tensor.is_inference():
        return tensor
    ways: Any = dlpack
    shared: torch.Tensor = ways.from_dlpack(ways.to_dlpack(tensor))
    return shared
