"""Batch-invariant activation functions and RMS norms, each one compiled call.

PyTorch computes whole vectors by one formula and the remainder by another, which differ in the last bits; how a tensor
is split depends on its size and on the number of threads. Here every number goes through the same instructions, so its
bits do not depend on its place. Activations based on the logistic function, tanh included, are compiled
(`lade/native/cpu_exponentials.h`). `erf` masks the remainder of a vector instead: GELU is composed of it in float32,
in pieces that fit a core's cache.

Modelling code writes RMS norms in three ways, which round at different points. Which of them a layer follows is found
by a trial, in both dtypes that the kernel supports, since the model may be cast later. Layers that match none are left
alone, and are covered by the trial of the whole model. Inputs that the kernel does not support use the original
forward.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from transformers import activations

from lade.backends.cpu.kernels import (
    CALLED,
    DTYPE_CODES,
    WIDEST,
    dtype_code,
    float_bits,
    is_plain,
    kernel,
    parts_of,
    refuse,
    run_on_team,
)
from lade.model.module_changes import Changed, change, own_class

AT_A_TIME = 2**17  # numbers per piece: half a megabyte in float32, which fits a typical L2 cache
_OF_ERF = (nn.GELU, activations.GELUActivation)
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
        coefficients = _coefficients_of(self.original, self)
        return gelu(x) if coefficients is None else times_logistic(x, *coefficients)


def replace_activations(model: nn.Module) -> None:
    """Replace the activations of a model by invariant ones, in place."""
    for layer in model.modules():
        if type(layer) in _OF_ERF or _coefficients_of(type(layer), layer) is not None:
            change(layer, InvariantActivation)


def _coefficients_of(kind: Any, layer: Any) -> Logistic | None:
    """Return the coefficients of an activation that is or was of this class; None for any other module."""
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
    return is_plain(x) and x.dtype in DTYPE_CODES and not (torch.is_grad_enabled() and x.requires_grad)


def times_logistic(x: torch.Tensor, slope: float = 1.0, cubic: float = 0.0) -> torch.Tensor:
    """Return x times the logistic function of `slope * x + cubic * x ** 3`, computed in float32."""
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


_ROWS = 16  # rows of the trial
_NAMES = ("variance_epsilon", "eps")
_NORM_DTYPES = (torch.bfloat16, torch.float32)


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if the kernel supports these tensors, and no gradients are needed."""
    if not (is_plain(x) and is_plain(weight) and x.dtype == weight.dtype and x.dtype in _NORM_DTYPES):
        return False
    columns = weight.numel()
    fits = columns >= WIDEST and weight.dim() == 1 and weight.is_contiguous() and x.dim() and x.shape[-1] == columns
    return bool(fits) and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))


def _normalised(x: torch.Tensor, weight: torch.Tensor, epsilon: float, kind: type[InvariantNorm]) -> torch.Tensor:
    """Divide rows by their root mean square and multiply by the weights, in float32; see `_takes`."""
    x = x.contiguous()
    found, numbers = torch.empty_like(x), x.numel()
    sizes = kind.fields(weight.numel(), numbers // weight.numel(), epsilon)
    fields = x.data_ptr(), weight.data_ptr(), found.data_ptr(), dtype_code(x.dtype), *sizes
    run_on_team(kernel("normalise"), fields, parts_of(numbers // CALLED))
    return found


class InvariantNorm(Changed):
    """Mixin for the class of a norm."""

    more: float  # added to the weights
    rounded: bool  # whether the normalised row is rounded to the layer's dtype before the weights multiply it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the norm; only the order in which squares are summed differs from the original."""
        weight: Any = self._parameters["weight"]
        if not _takes(x, weight):
            own: torch.Tensor = self.original.forward(self, x)
            return own
        return _normalised(x, weight, epsilon_of(self), type(self))

    @classmethod
    def fields(cls, columns: int, rows: int, epsilon: float) -> tuple[int, ...]:
        """Return the fields of a `Norm` behind addresses and dtype, see cpu_norms.h."""
        return columns, rows, float_bits(epsilon), float_bits(cls.more), int(cls.rounded)

    def fuses(self, dtype: torch.dtype, columns: int) -> bool:
        """Return True if the kernel takes rows of this dtype and size in place."""
        weight: Any = self._parameters["weight"]
        return weight.numel() == columns and not columns % WIDEST and weight.dtype == dtype and _takes(weight, weight)


class AsLlama(InvariantNorm):
    """Rounds the normalised row, then multiplies by the weights."""

    more, rounded = 0.0, True


class AsWhole(InvariantNorm):
    """Multiplies by the weights, then rounds once."""

    more, rounded = 0.0, False


class AsGemma(InvariantNorm):
    """Multiplies by one plus the weights, then rounds once."""

    more, rounded = 1.0, False


def replace_norms(model: nn.Module) -> None:
    """Replace the RMS norms of a model that follow one of the three formulas, in place."""
    for layer in model.modules():
        kind = _matching_class(layer)
        if kind is not None:
            change(layer, kind)


def _matching_class(layer: nn.Module) -> type[InvariantNorm] | None:
    """Return the invariant class that matches a norm up to rounding; None for other modules."""
    weight = layer._parameters.get("weight")
    if not own_class(layer).__name__.endswith("RMSNorm") or len(layer._parameters) != 1 or weight is None:
        return None
    with torch.no_grad():
        lone = len(inspect.signature(layer.forward).parameters) == 1
        if not (lone and _takes(weight, weight) and isinstance(epsilon_of(layer), float)):
            return None
        weights = [weight.to(dtype) for dtype in _NORM_DTYPES]
        same = {kind: [_equal_elements(kind, layer, each) for each in weights] for kind in (AsLlama, AsWhole, AsGemma)}
    best = max(same, key=lambda kind: sum(same[kind]))
    return best if all(same[best]) else None


def _equal_elements(kind: type[InvariantNorm], layer: nn.Module, weight: torch.Tensor) -> int:
    """Return the number of elements with the layer's bits; 0 if any differs by more than rounding."""
    x = torch.randn(_ROWS, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    x = (x * torch.logspace(-2, 2, _ROWS, dtype=torch.float32, device="cpu")[:, None]).to(weight.dtype)
    expected = functional_call(layer, {"weight": weight}, (x,))
    found = _normalised(x, weight, epsilon_of(layer), kind)
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return 0
    error = 4 * torch.finfo(found.dtype).eps
    return int((found == expected).sum()) if torch.allclose(found, expected, rtol=error, atol=0.0) else 0


def epsilon_of(layer: nn.Module) -> Any:
    """Return the number that a norm adds to the mean square; None if it has none."""
    for name in _NAMES:
        if name in layer.__dict__:
            return layer.__dict__[name]
    return next((getattr(layer, name) for name in _NAMES if hasattr(layer, name)), None)
