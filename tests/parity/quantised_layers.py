"""Quantised layers for tests, one for each way in which the libraries quantise, and a tensor that wraps its codes."""

from __future__ import annotations

from typing import Any

import torch
from families import VOCABULARY
from torch import nn
from torch.nn.functional import linear

from lade.testing import toy_model


def to_codes(values: torch.Tensor, largest: torch.Tensor, steps: int = 127) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers up to `steps`, and the scale that makes values of them."""
    scale = largest.clamp(min=1e-4) / steps
    return (values / scale).round().clamp(-steps, steps), scale


class WeightsOnly(nn.Linear):
    """Weights of four bits, a scale for each output."""

    @property
    def rounded(self) -> torch.Tensor:
        codes, scale = to_codes(self.weight, self.weight.abs().amax(dim=1, keepdim=True), steps=7)
        return codes * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.rounded, self.bias)


class PerToken(WeightsOnly):
    """Inputs of eight bits, a scale for each token."""

    def fed(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = to_codes(x, x.abs().amax(dim=-1, keepdim=True))
        return codes * scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.fed(x), self.rounded, self.bias)


class PerTokenFloat8(PerToken):
    def fed(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-3) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


class Static(PerToken):
    """A scale that was found beforehand."""

    def fed(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = to_codes(x, torch.tensor(8.0, dtype=x.dtype))
        return codes * scale


class StaticFloat8(PerToken):
    def fed(self, x: torch.Tensor) -> torch.Tensor:
        return (x / 0.037).to(torch.float8_e4m3fn).to(x.dtype) * 0.037


class Smoothed(PerToken):
    """Each input has a factor of its own before it is rounded, which is taken back in the weights."""

    def fed(self, x: torch.Tensor) -> torch.Tensor:
        factors = torch.linspace(0.3, 3, x.shape[-1], dtype=x.dtype)
        return super().fed(x * factors) / factors


class PerTensor(PerToken):
    """One scale for all that is fed."""

    def fed(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = to_codes(x, x.abs().max())
        return codes * scale


class OutlierColumns(PerToken):
    """LLM.int8: columns in which any token is large are multiplied as they are."""

    threshold = 3.0

    def fed(self, x: torch.Tensor) -> torch.Tensor:
        outliers = (x.abs() >= self.threshold).flatten(0, -2).any(dim=0)
        codes, scale = to_codes(x, x.masked_fill(x.abs() >= self.threshold, 0).abs().amax(dim=-1, keepdim=True))
        return torch.where(outliers, x, codes * scale)


class OneTokenOtherwise(WeightsOnly):
    """One kernel for one token, and for several another one, of other weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight if x.shape[-2] == 1 else self.rounded, self.bias)


class InBfloat16(WeightsOnly):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x.bfloat16(), self.rounded.bfloat16()).to(x.dtype)


class Unsteady(WeightsOnly):
    """Adds in another order every time."""

    generator = torch.Generator().manual_seed(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = linear(x.double(), self.rounded.double())
        noise = torch.randn(output.shape, generator=self.generator).double()
        return (output * (1 + 1e-6 * noise)).to(x.dtype)


class Coded(torch.Tensor):
    """A weight that passes for a float tensor and is codes of eight bits and scales, as torchao's are."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Coded({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is linear:
            x, weight, *bias = args
            return linear(x, weight.codes.to(x.dtype) * weight.scales, *bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scales)
        raise NotImplementedError(f"{function} of codes")


def coded(weight: torch.Tensor) -> nn.Parameter:
    codes, scales = to_codes(weight.detach(), weight.detach().abs().amax(dim=1, keepdim=True))
    return nn.Parameter(Coded(codes.to(torch.int8), scales), requires_grad=False)


def linears(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def toy(kind: type[nn.Linear] = nn.Linear, dtype: torch.dtype = torch.float32, **arguments: Any) -> Any:
    """A toy model all of whose linear layers are of this kind."""
    model = toy_model(vocabulary=VOCABULARY, dtype=dtype, **arguments)
    for layer in linears(model):
        layer.__class__ = kind
    return model


def coded_toy(**arguments: Any) -> Any:
    """A toy model all of whose linear layers are torch's own, with wrapped weights."""
    model = toy(**arguments)
    for layer in linears(model):
        layer.weight = coded(layer.weight)
    return model
