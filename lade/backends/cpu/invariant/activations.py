"""Batch-invariant activation functions in compiled calls.

Nothing in it is a sum, and all numbers go through the same instructions (`kernels.logistic`): so a number has the same
bits wherever it stands.

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

from lade.backends.cpu.kernels.kinds import is_plain, kind_of, refuse
from lade.backends.cpu.kernels.logistic import weigh_by_logistic
from lade.backends.cpu.kernels.vectors import WIDEST
from lade.backends.cpu.worker_threads import bits, in_team
from lade.model.in_place_subclassing import Changed, change

_MANY = 2**14  # numbers that are worth a thread of their own
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def takes(x: torch.Tensor) -> bool:
    """Whether the kernel computes this, and nobody wants gradients of it."""
    return is_plain(x) and x.dtype in _DTYPES and not (torch.is_grad_enabled() and x.requires_grad)


def times_logistic(x: torch.Tensor, steep: float = 1.0, cubic: float = 0.0) -> torch.Tensor:
    """The argument times the logistic function of `steep * x + cubic * x ** 3`, computed in float32, without gradients.

    Args:
        x: of 16 or 32 bits, on the CPU.
        steep: see above.
        cubic: see above.

    Raises:
        ValueError: x is of another dtype, on another device, or wants gradients.
    """
    if not takes(x):
        refuse("x times a logistic function", "float32, bfloat16 and float16 on the CPU, without gradients", x=x)
    if x.dtype == torch.float16:
        return times_logistic(x.float(), steep, cubic).to(x.dtype)
    numbers = x.numel()
    if numbers < WIDEST:  # fewer than a vector may have
        padded = torch.nn.functional.pad(x.reshape(-1), (0, WIDEST - numbers))
        return times_logistic(padded, steep, cubic)[:numbers].view(x.shape)
    x = x.contiguous()
    found = torch.empty_like(x)
    fields = x.data_ptr(), found.data_ptr(), kind_of(x.dtype), bits(-steep), bits(-cubic), numbers
    in_team(weigh_by_logistic, fields, max(1, min(torch.get_num_threads(), numbers // _MANY)), holds=(x, found))
    return found


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
