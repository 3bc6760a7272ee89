"""Hooks, replaced forwards and adapters that prevent graph capture or inference mode.

Inference mode makes a pass of a small model, which consists of hundreds of small operations, 6 % faster; the numbers
are the same. But its tensors may not be written to outside the mode, and autograd refuses them. So none of them may
reach user code: logits and the cache's buffers are ordinary tensors, and a model in which anything else might keep a
tensor of a pass runs without inference mode.

This is checked when a generation begins, or a request of an engine: hooks that are added later get inference tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import dlpack
from transformers import PretrainedConfig, PreTrainedModel

from lade.model import module_changes
from lade.model.facts import PACKED, SURVEYED, ModelFacts
from lade.model.inputs import MaskPlan

_IDLE_HOOKS = frozenset({"transformers.utils.output_capturing", module_changes.__name__})
"""Modules whose hooks have no effect here: transformers leaves its hooks on a model that has returned hidden states,
and those of this package act in other threads."""
GIVE_INSIDE = "pass the wrapped model, its .module"


def wraps_model(model: Any) -> bool:
    """Return whether it is a wrapper for distributed training, such as DistributedDataParallel."""
    inside = getattr(model, "_modules", {}).get("module", None) if isinstance(model, nn.Module) else None
    return isinstance(inside, PreTrainedModel) or type(model).__module__.startswith("torch.distributed.fsdp.fully")


def capture_blocker(facts: ModelFacts) -> str:
    """Return the reason why replaying a captured pass would skip code that an eager pass calls; empty if none."""
    if any("forward" in vars(module) for module in facts.replaced):
        return "the forward of a module was replaced, and a replay would not call it"
    called = [
        hook
        for module in facts.hooked
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    if [hook for hook in called if getattr(hook, "__module__", "") not in _IDLE_HOOKS] or facts.having("_hf_hook"):
        return "its modules have hooks, which a replay would not call"
    if "peft" in {kind.__module__.partition(".")[0] for kind in facts.kinds}:
        return "its adapters can be switched from call to call"
    return ""


_KNOWN = frozenset({"torch", "transformers", "lade"})
"""Packages whose modules keep no tensor of a pass."""


class PassMode:
    """The context in which a model makes its passes: its facts are known, and inference mode is on where it is safe.

    Masks of this package's own classes cannot be sliced in inference mode.
    """

    def __init__(self, facts: ModelFacts, plan: MaskPlan) -> None:
        self._facts = facts
        self._may_infer = not (plan.compact or plan.placed or inference_mode_blocker(facts))

    @contextmanager
    def __call__(self, *patches: object) -> Iterator[None]:
        """Return the context for one pass; any active patches (true values) rule inference mode out."""
        outer, SURVEYED.now = SURVEYED.now, self._facts
        infers = self._may_infer and not any(patches) and not torch.is_autocast_enabled("cpu")  # it caches casts
        try:
            with torch.inference_mode() if infers else nullcontext():
                yield
        finally:
            SURVEYED.now = outer


def inference_mode_blocker(facts: ModelFacts) -> str:
    """Return the reason why the model's passes are not made in inference mode; empty if they are."""
    if {weight.device.type for weight in facts.weights} - {"cpu"}:
        return "it has been tested on CPUs only"
    packed = PACKED.loaded()
    ordinary_kinds = {nn.Parameter} if packed is None else {nn.Parameter, packed.packed_weight}
    if set(map(type, facts.weights)) - ordinary_kinds:
        return "its weights are of a custom class"
    if {kind.__module__.partition(".")[0] for kind in facts.kinds} - _KNOWN:
        return "its modules are of other packages, and may keep their inputs"
    if [thing for thing in facts.foreign if not isinstance(thing, PretrainedConfig)]:
        return "foreign code takes part, and may keep its inputs"
    if facts.compiled:
        return "its modules are compiled"
    if [kind for kind in facts.kinds if hasattr(kind, "make_weights")]:  # as in M2M100 and XGLM
        return "a pass may replace its table of positions"
    positions = facts.positions
    if positions.longrope_switch is not None or positions.dynamic is not None:
        return "a pass may replace its rotary frequencies"
    return capture_blocker(facts)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor that shares the memory of a pass's result, writable outside inference mode."""
    if not tensor.is_inference():
        return tensor
    untyped: Any = dlpack
    shared: torch.Tensor = untyped.from_dlpack(untyped.to_dlpack(tensor))
    return shared
