"""Layers and experts that multiply rows by weights, and the row padding that each of them needs.

Registers `lade_invariant` with transformers' experts interface. Each expert computes all tokens routed to it, as
transformers' own loop does; a token's results are added in the order of expert indices, which does not depend on the
other tokens.

Padding makes a few rows round like many, and is found by a trial. Where other kernels take over for many rows, as on
processors with AMX, many rows are fed in pieces, unless the layer is packed in panels, whose product needs neither.
Layers always get contiguous rows: PyTorch multiplies strided ones, such as the last tokens of a batch's prompts, one by
one, or adds the bias after rounding.

Sums in another order differ in the last bits of float32, which rounding to 16 bits hides but once in ten thousand
times. So the trial uses weights and inputs whose products cancel: the sum that is left consists of rounding errors
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.pytorch_utils import Conv1D

from lade.backends.cpu.packing.integers import Int8Linear
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.panel_products import panel_product
from lade.backends.cpu.packing.weight import HugePages, PanelWeight, in_panels, packed_weight
from lade.errors import UnsupportedModelError
from lade.model.config import dtype_name
from lade.model.module_changes import Changed, change

_PADDING = "row_padding"
ROWS = (*range(1, 129), 200, 500)  # numbers of rows to compare in the trial
_SHIFTS = 64
_FEW, _SEVERAL = (1, 2, 4), (8, 16, 32)
_MANY, _LESS = (128, 96, 64), (48, 32)  # rows per call, where other kernels take over for many rows
_SIZE, _SPREAD = 16.0, 4
"""Magnitude of the trial's weights and inputs, large enough for float16, and its spread in powers of two."""
Layer = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class RowPadding:
    """Constraints on the number of rows that a layer is fed."""

    least: int = 1
    multiple: int = 1  # the rows must be a multiple of it
    most: int | None = None  # rows per call, a multiple of the others; more rows are fed in pieces

    def fits(self, rows: int) -> bool:
        """Return True if this many rows need no padding; asked at every layer of every step."""
        return rows >= self.least and rows % self.multiple == 0 and (self.most is None or rows <= self.most)

    def __call__(self, rows: int) -> int:
        """Return the number of rows to add."""
        return max(self.least, -(-rows // self.multiple) * self.multiple) - rows


NO_PADDING = RowPadding()
PADDINGS = (
    *(RowPadding(least, multiple) for least in _FEW for multiple in sorted({1, least})),
    *(RowPadding(each, each, most) for each in _FEW for most in _MANY),
    *(RowPadding(each, each) for each in _SEVERAL),
    *(RowPadding(each, each, most) for each in _FEW for most in _LESS),
    *(RowPadding(each, each, most) for each in _SEVERAL for most in (*_MANY, *_LESS) if most % each == 0),
    *(RowPadding(least) for least in (64, 128)),  # for tiny layers, which use other kernels
)
"""Candidate paddings, cheapest first."""


class PaddedRows(Changed):
    """Mixin for the class of a layer that maps `[..., in]` to `[..., out]`, or to several tensors `[rows, ...]`."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer on padded rows, and return the results without padding."""
        layer, padding = super().forward, padding_of(self)
        if padding.fits(x.numel() // x.shape[-1]):
            return layer(x.contiguous(), *args, **kwargs)
        return call_padded(lambda rows: layer(rows, *args, **kwargs), x, padding)


def call_padded(layer: Layer, x: torch.Tensor, padding: RowPadding) -> Any:
    """Call a layer with rows of zeros appended to those of `x`, `[..., in]`; return its results for `x`."""
    rows = x.numel() // x.shape[-1]
    if padding.most is not None and rows > padding.most:
        parts = [call_padded(layer, piece, padding) for piece in x.reshape(rows, x.shape[-1]).split(padding.most)]
        if isinstance(parts[0], tuple):
            return tuple(map(torch.cat, zip(*parts, strict=True)))
        return torch.cat(parts).view(*x.shape[:-1], parts[0].shape[-1])
    more = padding(rows)
    if not more:
        return layer(x.contiguous())
    found = layer(torch.nn.functional.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, more)))
    if isinstance(found, tuple):
        return tuple(each[:rows] for each in found)
    return found[:rows].view(*x.shape[:-1], found.shape[-1])


def pad_rows(layer: nn.Module, padding: RowPadding) -> None:
    """Pad the rows of a layer from now on."""
    change(layer, PaddedRows)
    layer.__dict__[_PADDING] = padding


def forget_padding(model: nn.Module) -> None:
    """Remove the recorded padding from all layers of a model."""
    for layer in model.modules():
        layer.__dict__.pop(_PADDING, None)


def padding_of(layer: nn.Module) -> RowPadding:
    """Return the recorded padding of a layer; no padding if there is none."""
    padding: RowPadding = layer.__dict__.get(_PADDING, NO_PADDING)
    return padding


@torch.no_grad()
def padding_for(layer: Layer, features: int, dtype: torch.dtype) -> RowPadding | None:
    """Return the cheapest padding with which a row gets the same bits in every pass; None if there is none.

    The layer maps rows `[..., features]` of a dtype to outputs, one tensor or several, by weights from `cancelling`.
    """
    generator = torch.Generator().manual_seed(1)
    half = _drawn((max(ROWS) + _SHIFTS, features // 2), generator)
    odd = torch.zeros(len(half), features % 2, dtype=torch.float32, device="cpu")
    x = torch.cat([half, -half, odd], 1)[:, _order(features)]
    return next((padding for padding in PADDINGS if _rounds_alike(layer, x.to(dtype), padding)), None)


def cancelling(weight: torch.Tensor, *, features_first: bool = False) -> torch.Tensor:
    """Return weights in the shape and dtype of `[..., out, in]`, or `[..., in, out]`, that cancel the trial's rows."""
    *shape, out, features = weight.mT.shape if features_first else weight.shape
    half = _drawn((*shape, out, features // 2), torch.Generator().manual_seed(0))
    odd = torch.ones(*shape, out, features % 2, dtype=torch.float32, device="cpu")
    drawn = torch.cat([half, half, odd], -1)[..., _order(features)].to(weight.dtype)
    return drawn.mT.contiguous() if features_first else drawn


def _drawn(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draw numbers of very different magnitudes; sums of 8-bit significands of equal magnitude would not be rounded."""
    sizes = torch.randint(-_SPREAD, _SPREAD + 1, tuple(shape), generator=generator, dtype=torch.int64, device="cpu")
    return torch.ldexp(_SIZE * torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu"), sizes)


def _order(features: int) -> torch.Tensor:
    return torch.randperm(features, generator=torch.Generator().manual_seed(2), dtype=torch.int64, device="cpu")


def _rounds_alike(layer: Layer, x: torch.Tensor, padding: RowPadding) -> bool:
    """Return True if rows `[N, in]` get the same bits in every pass over some of them, at any place in it."""
    expected = _outputs(layer, x, padding)
    tried = (rows for rows in ROWS if padding.most is None or rows <= padding.most)  # more go in pieces
    for rows in tried:
        for first in range(rows * 7 % 8, _SHIFTS, max(8, min(_SHIFTS, 4 * rows))):  # few rows at several places
            part = slice(first, first + rows)
            found = _outputs(layer, x[part], padding)
            if not all(torch.equal(each, whole[part]) for each, whole in zip(found, expected, strict=True)):
                return False
    return True


def _outputs(layer: Layer, x: torch.Tensor, padding: RowPadding) -> tuple[torch.Tensor, ...]:
    found = call_padded(layer, x, padding)
    return found if isinstance(found, tuple) else (found,)


NAME = "lade_invariant"
_TRIAL_PANELS = 9
"""Panels of a trial: more than a thread's share, and an odd number, since some kernels take two at a time."""
VECTORS = RowPadding(multiple=32)
"""Padding for modules that compute more than products.

PyTorch computes the remainder of a vector by another formula, and 32 rows leave no remainder.
"""


@dataclass(frozen=True)
class RowProduct:
    """A product of rows by weights."""

    layer: Layer  # maps [rows, in] to [rows, out], or to several such tensors
    features: int  # number of inputs
    dtype: torch.dtype  # of the inputs
    kind: Hashable  # equal for products computed by the same kernels


def pad_all(model: PreTrainedModel, known: Sequence[RowPadding | None]) -> Sequence[RowPadding | None]:
    """Pad the rows of every layer of a model, in place, after a trial of each distinct shape and dtype.

    `known` is what trials of a model of the same structure returned; empty for none.

    Returns:
        The paddings of the distinct products, in their order; None where no padding is enough.

    Raises:
        UnsupportedModelError: no padding makes some layer invariant; the message names the layer.
    """
    layers = {name: (layer, list(_products(layer, model.dtype))) for name, layer in model.named_modules()}
    distinct = {product.kind: (layer, product) for layer, products in layers.values() for product in products}
    if len(known) != len(distinct):
        known = [_padding_of_trial(*each) for each in distinct.values()]
    padding_of_kind = dict(zip(distinct, known, strict=True))
    for name, (layer, products) in layers.items():
        if not products:
            continue
        paddings = [padding_of_kind[product.kind] for product in products]
        has_own_gate = _is_mixture(layer) and type(layer)._apply_gate is not _default_apply_gate
        padding = _joined([*paddings, VECTORS] if has_own_gate or _is_router(layer) else paddings)
        if padding is None:
            what = f"layer {name!r} ({type(layer).__name__} in {dtype_name(products[0].dtype)})"
            raise UnsupportedModelError(
                f"{what} rounds a token differently when other tokens are in the pass, whatever their number",
                "use the model unchanged, or in another dtype",
            )
        if _is_mixture(layer):
            layer.__dict__[_PADDING] = padding  # for `invariant_experts`
        elif padding != NO_PADDING or not _is_in_panels(layer):  # panels' products lay rows out themselves
            pad_rows(layer, padding)
    return known


def _padding_of_trial(layer: nn.Module, product: RowProduct) -> RowPadding | None:
    with nullcontext() if _is_in_panels(layer) else _weights_of_trial(layer):  # panels draw their own
        return padding_for(product.layer, product.features, product.dtype)


def _is_in_panels(layer: Any) -> bool:
    return isinstance(layer, PackedLinear) and layer.panel > 0


def lay_out(model: nn.Module, *, panels: bool) -> None:
    """Convert packed bfloat16 weights to panels, whose products do not depend on the other rows, or back, in place."""
    pages = HugePages() if panels else None
    for layer in model.modules():
        if isinstance(layer, PackedLinear) and not isinstance(layer, Int8Linear):
            layer.lay_out(pages)


def has_mixtures(model: nn.Module) -> bool:
    """Return True if some layers are mixtures of experts with transformers' experts interface."""
    return any(map(_is_mixture, model.modules()))


def invariant_experts(
    self: Any,  # experts module, marked by transformers' decorator
    hidden_states: torch.Tensor,  # [T, hidden]
    top_k_index: torch.Tensor,  # [T, k] int64, experts of each token
    top_k_weights: torch.Tensor,  # [T, k], router weights of these experts
) -> torch.Tensor:
    """Compute the experts of a layer, `[T, hidden]`, as transformers' experts interface asks for it."""
    padding = padding_of(self)
    found = torch.zeros_like(hidden_states)
    for number in top_k_index.unique().tolist():
        tokens, places = torch.where(top_k_index == number)
        states = call_padded(partial(_one_expert, self, number), hidden_states[tokens], padding)
        if getattr(self, "has_post_expert_norm", False):
            states = self.post_expert_norm(states)
        found.index_add_(0, tokens, (states * top_k_weights[tokens, places, None]).to(found.dtype))
    return found


def _one_expert(experts: Any, number: int, rows: torch.Tensor) -> torch.Tensor:
    if experts.has_gate:
        states = experts._apply_gate(_one_product(experts, "gate_up_proj", rows, number))
    else:
        states = experts.act_fn(_one_product(experts, "up_proj", rows, number))
    return _one_product(experts, "down_proj", states, number)


def _one_product(experts: Any, name: str, rows: torch.Tensor, number: int = 0) -> torch.Tensor:
    """Multiply rows `[rows, in]` by a weight of one expert: `[rows, out]`."""
    weight = getattr(experts, name)[number]
    bias = getattr(experts, f"{name}_bias")[number] if experts.has_bias else None
    return linear(rows, weight.t() if experts.is_transposed else weight, bias)


def _products(layer: Any, dtype: torch.dtype) -> Iterator[RowProduct]:
    """Yield the products that a module itself computes, without its children, in a dtype if its weights tell none."""
    if _is_mixture(layer):
        for name in ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj"):
            weight = getattr(layer, name)
            features = weight.shape[1 if layer.is_transposed else 2]
            kind = (name, type(layer), weight.shape, weight.dtype)
            yield RowProduct(partial(_one_product, layer, name), features, weight.dtype, kind)
        return
    if isinstance(layer, Int8Linear):  # integer sums are exact, and each row has its own scale
        return
    if _is_in_panels(layer):
        yield _panel_product_of(layer)
        return
    weight = layer._parameters.get("weight")
    features = getattr(layer, "in_features", None)
    if isinstance(layer, Conv1D) and weight is not None:
        features = weight.shape[0]
    elif _is_router(layer):
        features = weight.shape[1]
    if isinstance(features, int) and "base_layer" not in layer._modules:
        own = weight is not None and weight.is_floating_point() and weight.dtype.itemsize > 1
        shape = (None, layer) if weight is None else (weight.shape, type(weight.data))
        given = weight.dtype if own else dtype
        yield RowProduct(layer, features, given, (type(layer), *shape, given, getattr(layer, "bias", None) is not None))


def _panel_product_of(layer: PackedLinear) -> RowProduct:
    """Return the product of a few panels, drawn when it is tried; a panel does not see the others."""
    inputs, dtype, panel, biased = layer.in_features, layer.dtype, layer.panel, layer.bias is not None
    outputs = min(layer.out_features, _TRIAL_PANELS * panel + layer.out_features % panel)

    @cache
    def drawn() -> tuple[PanelWeight, torch.Tensor | None]:
        weight = cancelling(torch.empty(outputs, inputs, dtype=dtype, device="cpu"))
        bias = torch.zeros(outputs, dtype=dtype, device="cpu") if biased else None
        return PanelWeight(in_panels(weight, None, panel), outputs, inputs), bias

    kind = ("panels", panel, outputs, inputs, biased)
    return RowProduct(lambda rows: panel_product(rows, *drawn()), inputs, dtype, kind)


def _is_mixture(layer: Any) -> bool:
    """Return True for experts, recognised by the attributes that transformers' decorator sets."""
    return hasattr(layer, "_apply_gate") and hasattr(layer, "has_gate") and hasattr(layer, "is_transposed")


def _is_router(layer: Any) -> bool:
    """Return True for a module with a matrix that is neither a linear layer, an embedding nor a mixture."""
    weight = layer._parameters.get("weight")
    known = isinstance(layer, Conv1D) or hasattr(layer, "in_features") or hasattr(layer, "num_embeddings")
    return weight is not None and weight.ndim == 2 and not known and not _is_mixture(layer)


def _joined(paddings: list[RowPadding | None]) -> RowPadding | None:
    """Return a padding that satisfies all of these; None if there is none."""
    known = [padding for padding in paddings if padding is not None]
    if len(known) < len(paddings):
        return None
    least, multiple = max(each.least for each in known), max(each.multiple for each in known)
    most = min((each.most for each in known if each.most is not None), default=None)
    if most is not None:
        most = most // multiple * multiple
    return RowPadding(least, multiple, most) if most is None or max(least, multiple) <= most else None


@contextmanager
def _weights_of_trial(layer: Any) -> Iterator[None]:
    """Give a module weights whose products with the trial's rows cancel, while the context lasts.

    Weights that are not plain tensors, such as quantised ones, are left alone.
    """
    own, packed = dict(layer._parameters), vars(layer).get("_packed")
    first = isinstance(layer, Conv1D) or (_is_mixture(layer) and layer.is_transposed)
    try:
        if packed is not None:
            shape = layer.out_features, layer.in_features
            vars(layer)["_packed"] = packed_weight(cancelling(torch.empty(shape, dtype=layer.dtype, device="cpu")))
        for name, weight in own.items():
            if weight is None or type(weight.data) is not torch.Tensor or not weight.dtype.is_floating_point:
                continue
            if packed is not None and name == "weight":
                continue  # `_packed` was replaced above
            drawn = torch.zeros_like(weight) if "bias" in name else cancelling(weight, features_first=first)
            layer._parameters[name] = nn.Parameter(drawn, requires_grad=False)
        yield
    finally:
        layer._parameters.update(own)
        if packed is not None:
            vars(layer)["_packed"] = packed


ALL_EXPERTS_FUNCTIONS.register(NAME, invariant_experts)
