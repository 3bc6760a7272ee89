"""Passes in torch's inference mode: operations then note nothing for autograd and count no versions.

A pass of a small model is made of hundreds of small operations, and takes 6 % less that way; the numbers are the same.
What comes of it are tensors that may not be written to outside of the mode, and that autograd refuses. Nobody but us
may be left with one of them. So

- logits are handed on as ordinary tensors, which share their memory;
- the cache allocates its buffers as ordinary tensors, see `TreeLayer`;
- models in which others might keep a tensor of a pass make their passes as ever: those with code from elsewhere, hooks,
  adapters or weights of a class of their own, recurrent layers, whose states are what a pass made them, and rotary
  frequencies that a pass may replace.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import dlpack

from lade.model.attachments import attached
from lade.model.packing.int8 import Int8Linear
from lade.model.position_limits import Positions
from lade.model.survey import Survey

_KNOWN = frozenset({"torch", "transformers", "lade"})
"""Packages whose modules keep nothing of a pass."""


def mode_of(survey: Survey, *, special: bool) -> Callable[[], AbstractContextManager[object]]:
    """The mode in which a model makes its passes, to be entered for each of them.

    Args:
        survey: of its modules.
        special: whether passes patch the model, or feed it masks of a class of our own, which this mode cannot cut.
    """
    return nullcontext if special or why_recorded(survey) else _unrecorded


def _unrecorded() -> AbstractContextManager[object]:
    """Inference mode, unless autocast keeps weights that it has cast."""
    return nullcontext() if torch.is_autocast_enabled("cpu") else torch.inference_mode()


def why_recorded(survey: Survey) -> str:
    """Why the passes of a model are not made in inference mode; empty if they are."""
    if any(weight.device.type != "cpu" for weight in survey.weights):
        return "it has been tried on CPUs alone"
    if any(type(weight) is not nn.Parameter for weight in survey.weights):
        return "its weights are of a class of their own"
    if any(kind.__module__.partition(".")[0] not in _KNOWN for kind in survey.kinds):
        return "its modules are of other packages, and may keep what they are fed"
    if any(issubclass(kind, Int8Linear) for kind in survey.kinds):
        return "its layers go by versions to share what they round"
    if any(vars(module).get("_compiled_call_impl") is not None for module in survey.modules):
        return "its modules are compiled"
    positions = Positions.of(survey.model.config.get_text_config(decoder=True))
    if positions.longrope_switch is not None or positions.dynamic is not None:
        return "a pass may replace its rotary frequencies"
    return attached(survey)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """One that shares the memory of what a pass gave, and that may be written to outside of inference mode."""
    if not tensor.is_inference():
        return tensor
    ways: Any = dlpack
    shared: torch.Tensor = ways.from_dlpack(ways.to_dlpack(tensor))
    return shared
