"""Batch-invariant RMS norms, each one compiled call.

Modelling code writes RMS norms in three ways, which round at different points. Which of them a layer follows is found
by a trial, in both dtypes that the kernel supports, since the model may be cast later. Layers that match none are left
alone, and are covered by the trial of the whole model. Inputs that the kernel does not support use the original
forward.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from lade.backends.cpu.kernels import WIDEST, dtype_code, is_plain, kernel
from lade.backends.cpu.worker_threads import CALLED, float_bits, parts_of, run_on_team
from lade.model.in_place_subclassing import Changed, change, own_class

_ROWS = 16  # rows of the trial
_NAMES = ("variance_epsilon", "eps")
_DTYPES = (torch.bfloat16, torch.float32)


class Formula(NamedTuple):
    """Variant of an RMS norm.

    Attributes:
        more: number added to the weights.
        rounded: true if the normalised row is rounded to the layer's dtype before the weights multiply it.
    """

    more: float
    rounded: bool


LLAMA, WHOLE, GEMMA = Formula(0.0, True), Formula(0.0, False), Formula(1.0, False)


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return True if the kernel supports these tensors, and no gradients are needed."""
    if not (is_plain(x) and is_plain(weight) and x.dtype == weight.dtype and x.dtype in _DTYPES):
        return False
    columns = weight.numel()
    fits = columns >= WIDEST and weight.dim() == 1 and weight.is_contiguous() and x.dim() and x.shape[-1] == columns
    return bool(fits) and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))


def _normalised(x: torch.Tensor, weight: torch.Tensor, epsilon: float, formula: Formula) -> torch.Tensor:
    """Divide rows by their root mean square and multiply by the weights, in float32; see `_takes`."""
    x = x.contiguous()
    found, numbers = torch.empty_like(x), x.numel()
    fields = (
        *(x.data_ptr(), weight.data_ptr(), found.data_ptr(), dtype_code(x.dtype)),
        *_sizes(weight.numel(), numbers // weight.numel(), epsilon, formula),
    )
    run_on_team(kernel("normalise"), fields, parts_of(numbers // CALLED))
    return found


def _sizes(columns: int, rows: int, epsilon: float, formula: Formula) -> tuple[int, ...]:
    """Return the fields of a `Norm` behind addresses and dtype, see cpu_norms.h."""
    return columns, rows, float_bits(epsilon), float_bits(formula.more), int(formula.rounded)


class InvariantNorm(Changed):
    """Mixin for the class of a norm."""

    formula: Formula

    @property
    def epsilon(self) -> Any:
        """The number added to the mean square."""
        return _epsilon_of(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the norm; only the order in which squares are summed differs from the original."""
        weight: Any = self._parameters["weight"]
        if not _takes(x, weight):
            own: torch.Tensor = self.original.forward(self, x)
            return own
        return _normalised(x, weight, _epsilon_of(self), self.formula)

    def fields(self, rows: int) -> tuple[int, ...]:
        """Return the fields of the kernel for so many rows, behind addresses and dtype."""
        weight: Any = self._parameters["weight"]
        return _sizes(weight.numel(), rows, _epsilon_of(self), self.formula)

    def fuses(self, dtype: torch.dtype, columns: int) -> bool:
        """Return True if the kernel takes rows of this dtype and size in place."""
        weight: Any = self._parameters["weight"]
        return weight.numel() == columns and not columns % WIDEST and weight.dtype == dtype and _takes(weight, weight)


class AsLlama(InvariantNorm):
    """Rounds the normalised row, then multiplies by the weights."""

    formula = LLAMA


class AsWhole(InvariantNorm):
    """Multiplies by the weights, then rounds once."""

    formula = WHOLE


class AsGemma(InvariantNorm):
    """Multiplies by one plus the weights, then rounds once."""

    formula = GEMMA


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
        if not _takes(weight, weight) or len(inspect.signature(layer.forward).parameters) != 1:
            return None
        if not isinstance(_epsilon_of(layer), float):
            return None
        weights = [weight.to(dtype) for dtype in _DTYPES]
        same = {kind: [_equal_elements(kind, layer, each) for each in weights] for kind in (AsLlama, AsWhole, AsGemma)}
    best = max(same, key=lambda kind: sum(same[kind]))
    return best if all(same[best]) else None


def _equal_elements(kind: type[InvariantNorm], layer: nn.Module, weight: torch.Tensor) -> int:
    """Return the number of elements with the layer's bits; 0 if any differs by more than rounding."""
    x = torch.randn(_ROWS, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    x = (x * torch.logspace(-2, 2, _ROWS, dtype=torch.float32, device="cpu")[:, None]).to(weight.dtype)
    expected = functional_call(layer, {"weight": weight}, (x,))
    found = _normalised(x, weight, _epsilon_of(layer), kind.formula)
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return 0
    error = 4 * torch.finfo(found.dtype).eps
    return int((found == expected).sum()) if torch.allclose(found, expected, rtol=error, atol=0.0) else 0


def _epsilon_of(layer: nn.Module) -> Any:
    for name in _NAMES:
        if name in layer.__dict__:
            return layer.__dict__[name]
    return next((getattr(layer, name) for name in _NAMES if hasattr(layer, name)), None)
