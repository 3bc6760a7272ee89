"""Batch-invariant RMS norms, each one compiled call.

Modelling code writes them in three ways, which differ in what is rounded when. Which one a layer is, is tried in both
dtypes that the kernel has, since a model may be cast later: what no formula agrees with stays as it is, and is held to
the same promise by the trial of the whole model. Inputs that the kernel was not compiled for go the layer's own way.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from lade.backends.cpu.kernels.kinds import is_plain, kind_of, refuse
from lade.backends.cpu.kernels.norms import normalise
from lade.backends.cpu.kernels.vectors import WIDEST
from lade.backends.cpu.worker_threads import bits, in_team
from lade.model.in_place_subclassing import Changed, change, own_class

_MANY = 2**14  # numbers that are worth a thread of their own
_ROWS = 16  # of the trial
_NAMES = ("variance_epsilon", "eps")
_DTYPES = (torch.bfloat16, torch.float32)


class Formula(NamedTuple):
    """How a norm is computed.

    Attributes:
        more: what is added to the weights.
        rounded: whether numbers are rounded to the layer's dtype before they are multiplied by the weights.
    """

    more: float
    rounded: bool


LLAMA, WHOLE, GEMMA = Formula(0.0, True), Formula(0.0, False), Formula(1.0, False)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, formula: Formula) -> torch.Tensor:
    """Rows over the root of the mean of their squares, times the weights; computed in float32, without gradients.

    Args:
        x: `[..., D]` on the CPU, bfloat16 or float32, D at least 32.
        weight: `[D]`, of the same dtype, contiguous.
        epsilon: what is added to the mean.
        formula: what is rounded when.

    Raises:
        ValueError: x or weight is something else, see `_takes`.
    """
    if not _takes(x, weight):
        takes = f"bfloat16 or float32 on the CPU, rows of {WIDEST} numbers or more, contiguous weights of their dtype"
        refuse("the RMS norm", takes, x=x, weight=weight)
    return _normalised(x, weight, epsilon, formula)


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel is compiled for these, and nobody wants gradients of them, which it has not."""
    if not (is_plain(x) and is_plain(weight) and x.dtype == weight.dtype and x.dtype in _DTYPES):
        return False
    columns = weight.numel()
    fits = columns >= WIDEST and weight.dim() == 1 and weight.is_contiguous() and x.dim() and x.shape[-1] == columns
    return bool(fits) and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))


def _normalised(x: torch.Tensor, weight: torch.Tensor, epsilon: float, formula: Formula) -> torch.Tensor:
    """As `rms_norm`, of what it takes."""
    x = x.contiguous()
    found, columns, numbers = torch.empty_like(x), weight.numel(), x.numel()
    places = x.data_ptr(), weight.data_ptr(), found.data_ptr()
    norm = bits(epsilon), bits(formula.more), int(formula.rounded)
    fields = *places, kind_of(x.dtype), columns, numbers // columns, *norm
    in_team(normalise, fields, max(1, min(torch.get_num_threads(), numbers // _MANY)), holds=(x, weight, found))
    return found


class Compiled(Changed):
    """Mixed into the class of a norm."""

    formula: Formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the norm, but for the order in which squares are summed."""
        weight: Any = self._parameters["weight"]
        if not _takes(x, weight):
            own: torch.Tensor = self.original.forward(self, x)
            return own
        return _normalised(x, weight, _epsilon_of(self), self.formula)


class AsLlama(Compiled):
    """Rounded, then times the weights."""

    formula = LLAMA


class AsWhole(Compiled):
    """Times the weights, then rounded."""

    formula = WHOLE


class AsGemma(Compiled):
    """Times one and the weights, then rounded."""

    formula = GEMMA


def compile_norms(model: nn.Module) -> None:
    """Replace the RMS norms of a model, in place, as far as they are one of the three."""
    for layer in model.modules():
        kind = _kind_of(layer)
        if kind is not None:
            change(layer, kind)


def _kind_of(layer: nn.Module) -> type[Compiled] | None:
    """What gives nearly the bits of a norm; None of what is none, or another one."""
    weight = layer._parameters.get("weight")
    if not own_class(layer).__name__.endswith("RMSNorm") or len(layer._parameters) != 1 or weight is None:
        return None
    with torch.no_grad():
        if not _takes(weight, weight) or len(inspect.signature(layer.forward).parameters) != 1:
            return None
        if not isinstance(_epsilon_of(layer), float):
            return None
        weights = [weight.to(dtype) for dtype in _DTYPES]
        same = {kind: [_alike(kind, layer, each) for each in weights] for kind in (AsLlama, AsWhole, AsGemma)}
    best = max(same, key=lambda kind: sum(same[kind]))
    return best if all(same[best]) else None


def _alike(kind: type[Compiled], layer: nn.Module, weight: torch.Tensor) -> int:
    """How many numbers have a layer's bits, given this weight; 0 if one differs by more than rounding does."""
    x = torch.randn(_ROWS, len(weight), generator=torch.Generator().manual_seed(0))
    x = (x * torch.logspace(-2, 2, _ROWS)[:, None]).to(weight.dtype)
    expected = functional_call(layer, {"weight": weight}, (x,))
    found = rms_norm(x, weight, _epsilon_of(layer), kind.formula)
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return 0
    error = 4 * torch.finfo(found.dtype).eps
    return int((found == expected).sum()) if torch.allclose(found, expected, rtol=error, atol=0.0) else 0


def _epsilon_of(layer: nn.Module) -> Any:
    for name in _NAMES:
        if name in layer.__dict__:
            return layer.__dict__[name]
    return next((getattr(layer, name) for name in _NAMES if hasattr(layer, name)), None)
