"""Batch-invariant activation functions.

PyTorch computes whole vectors by one formula and the remainder by another, which differ in the last bits; how a tensor
is split depends on its size and on the number of threads. Here every number goes through the same instructions, so its
bits do not depend on its place. Activations based on the logistic function, tanh included, are compiled
(`lade/native/cpu_exponentials.h`). `erf` masks the remainder of a vector instead: GELU is composed of it in float32,
in pieces that fit a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import activations

from lade.backends.cpu.kernels import WIDEST, dtype_code, is_plain, kernel, refuse
from lade.backends.cpu.worker_threads import CALLED, float_bits, parts_of, run_on_team
from lade.model.in_place_subclassing import Changed, change

Function = Callable[[torch.Tensor], torch.Tensor]
AT_A_TIME = 2**17
"""Numbers per piece: half a megabyte in float32, which fits a typical L2 cache."""
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_OF_TANH = (
    nn.GELU,
    activations.PytorchGELUTanh,  # has this name in all versions
    activations.NewGELUActivation,
    activations.FastGELUActivation,
    activations.AccurateGELUActivation,
)


class Logistic(NamedTuple):
    """Activation x times the logistic function of `slope * x + cubic * x ** 3`."""

    slope: float = 1.0
    cubic: float = 0.0


SILU, QUICK_GELU = Logistic(), Logistic(1.702)
_TANH_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_TANH = Logistic(_TANH_SLOPE, 0.044715 * _TANH_SLOPE)
"""GELU approximated by tanh, using 1 + tanh(u) = 2 * logistic(2 u)."""


class InvariantActivation(Changed):
    """Mixin for the class of an activation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the activation, rounded once at the end; inputs without a kernel use the original forward."""
        if not takes(x):
            own: torch.Tensor = self.original.forward(self, x)
            return own
        function = _function_of(self.original, self)
        assert function is not None
        return function(x)


def replace_activations(model: nn.Module) -> None:
    """Replace the activations of a model by invariant ones, in place."""
    for layer in model.modules():
        if _function_of(type(layer), layer) is not None:
            change(layer, InvariantActivation)


def _function_of(kind: Any, layer: Any) -> Function | None:
    """Return the invariant function of an activation; None for modules that need no replacement."""
    coefficients = _coefficients_of(kind, layer)
    if coefficients is not None:
        return partial(times_logistic, slope=coefficients.slope, cubic=coefficients.cubic)
    return gelu if kind is activations.GELUActivation or kind is nn.GELU else None


def _coefficients_of(kind: Any, layer: Any) -> Logistic | None:
    if kind in (nn.SiLU, activations.SiLUActivation):
        return SILU
    if kind is activations.QuickGELUActivation:
        return QUICK_GELU
    return GELU_TANH if kind in _OF_TANH and not (kind is nn.GELU and layer.approximate == "none") else None


def logistic_of(layer: Any) -> Logistic | None:
    """Return the coefficients of an activation that `replace_activations` has replaced; None for any other."""
    return _coefficients_of(layer.original, layer) if isinstance(layer, InvariantActivation) else None


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return x times the normal distribution function."""
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    for part, out in zip(x.flatten().split(AT_A_TIME), found.view(-1).split(AT_A_TIME), strict=True):
        numbers = part.float()
        out.copy_(0.5 * numbers * (1 + torch.erf(numbers * math.sqrt(0.5))))
    return found


def takes(x: torch.Tensor) -> bool:
    """Return True if the kernel supports this tensor, and no gradients are needed."""
    return is_plain(x) and x.dtype in _DTYPES and not (torch.is_grad_enabled() and x.requires_grad)


def times_logistic(x: torch.Tensor, slope: float = 1.0, cubic: float = 0.0) -> torch.Tensor:
    """Return x times the logistic function of `slope * x + cubic * x ** 3`, computed in float32, without gradients.

    Args:
        x: float32, bfloat16 or float16 tensor on the CPU.
        slope: coefficient of x in the argument of the logistic function.
        cubic: coefficient of x ** 3 in the argument of the logistic function.

    Raises:
        ValueError: x has another dtype or device, or requires gradients.
    """
    if not takes(x):
        refuse("x times a logistic function", "float32, bfloat16 and float16 on the CPU, without gradients", x=x)
    if x.dtype == torch.float16:
        return times_logistic(x.float(), slope, cubic).to(x.dtype)
    numbers = x.numel()
    if numbers < WIDEST:  # shorter than the widest vector
        padded = torch.nn.functional.pad(x.reshape(-1), (0, WIDEST - numbers))
        return times_logistic(padded, slope, cubic)[:numbers].view(x.shape)
    x = x.contiguous()
    found = torch.empty_like(x)
    bits = float_bits(-slope), float_bits(-cubic)
    fields = x.data_ptr(), 0, found.data_ptr(), dtype_code(x.dtype), *bits, numbers
    run_on_team(kernel("logistic_product"), fields, parts_of(numbers // CALLED))
    return found
