"""Activation functions that give a number the same bits wherever in a tensor it stands.

PyTorch's own compute whole vectors of numbers by one formula and what is left over by another, which differ in their
last places; how a tensor is divided depends on its size and on the number of threads. What is made of the logistic
function, as the hyperbolic tangent is, is compiled (`logistic`). `erf` masks what is left over of a vector: the GELU
is composed of it, in float32, of so many numbers at a time as a core's cache holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import activations

from lade.model.class_change import Changed, change
from lade.model.invariant.logistic import takes, times_logistic

Function = Callable[[torch.Tensor], torch.Tensor]

AT_A_TIME = 2**17
"""Numbers: half a megabyte in float32, which a usual second-level cache holds."""
_OF_TANH = (
    nn.GELU,
    activations.PytorchGELUTanh,  # the name that all versions have
    activations.NewGELUActivation,
    activations.FastGELUActivation,
    activations.AccurateGELUActivation,
)


def silu(x: torch.Tensor) -> torch.Tensor:
    """The argument times its logistic function."""
    return times_logistic(x)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU by way of the logistic function."""
    return times_logistic(x, 1.702)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by way of the hyperbolic tangent: 1 + tanh(u) is twice the logistic function of 2 u."""
    steep = 2 * math.sqrt(2 / math.pi)
    return times_logistic(x, steep, 0.044715 * steep)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The argument times the normal distribution function."""
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, out in zip(x.flatten().split(AT_A_TIME), found.view(-1).split(AT_A_TIME), strict=True):
        numbers = part.float()
        out.copy_(0.5 * numbers * (1 + torch.erf(numbers * math.sqrt(0.5))))
    return found


class Composed(Changed):
    """Mixed into the class of an activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the activation, rounded once at the end; what no kernel was compiled for goes the activation's own way."""
        if not takes(x):
            own: torch.Tensor = self.original.forward(self, x)
            return own
        function = _function_of(self.original, self)
        assert function is not None
        return function(x)


def compose_activations(model: nn.Module) -> None:
    """Replace the activations of a model, in place."""
    for layer in model.modules():
        if _function_of(type(layer), layer) is not None:
            change(layer, Composed)


def _function_of(kind: Any, layer: Any) -> Function | None:
    """What computes an activation otherwise; None of what does not need it."""
    if kind in (nn.SiLU, activations.SiLUActivation):
        return silu
    if kind is activations.QuickGELUActivation:
        return quick_gelu
    if kind is activations.GELUActivation or (kind is nn.GELU and layer.approximate == "none"):
        return gelu
    return gelu_tanh if kind in _OF_TANH else None
