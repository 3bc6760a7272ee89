"""Layers and experts that multiply rows by weights, and the padding each of them needs.

An implementation `lade_invariant` of transformers' interface for experts. Each expert computes all tokens that chose
it, as transformers' own loop does; a token's results are added up in the order of the experts' numbers, which does not
depend on the other tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.pytorch_utils import Conv1D

from lade.backends.cpu.invariant.padded_rows import (
    RowPadding,
    call_padded,
    cancelling,
    note_padding,
    pad_rows,
    padding_for,
    padding_of,
)
from lade.backends.cpu.packing.int8 import Int8Linear
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.tile_products import in_panels
from lade.backends.cpu.packing.weight import HugePages, packed_weight
from lade.errors import UnsupportedModelError
from lade.model.config import dtype_name

NAME = "lade_invariant"


def invariant_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts' part of a layer.

    Args:
        self: the layer's experts, as transformers' decorator marks them.
        hidden_states: `[T, hidden]`.
        top_k_index: `[T, k]` int64, the experts of each token.
        top_k_weights: `[T, k]`, their weights.

    Returns:
        `[T, hidden]`.
    """
    padding = padding_of(self)
    found = torch.zeros_like(hidden_states)
    for number in top_k_index.unique().tolist():
        tokens, places = torch.where(top_k_index == number)
        inner = expert_product(self, "gate_up_proj" if self.has_gate else "up_proj", number)
        outer = expert_product(self, "down_proj", number)
        states = call_padded(partial(_one_expert, self, inner, outer), hidden_states[tokens], padding)
        if getattr(self, "has_post_expert_norm", False):
            states = self.post_expert_norm(states)
        found.index_add_(0, tokens, (states * top_k_weights[tokens, places, None]).to(found.dtype))
    return found


def _one_expert(experts: Any, inner: Any, outer: Any, rows: torch.Tensor) -> torch.Tensor:
    states = inner(rows)
    found: torch.Tensor = outer(experts._apply_gate(states) if experts.has_gate else experts.act_fn(states))
    return found


def has_own_gate(experts: Any) -> bool:
    """Whether experts have activations of their own, and not just those of their activation module."""
    return type(experts)._apply_gate is not _default_apply_gate


def expert_product(experts: Any, name: str, number: int) -> Any:
    """The linear map of one expert: `[rows, in]` to `[rows, out]`."""
    weight = getattr(experts, name)[number]
    bias = getattr(experts, f"{name}_bias")[number] if experts.has_bias else None
    if experts.is_transposed:
        return partial(_transposed, weight=weight, bias=bias)
    return partial(linear, weight=weight, bias=bias)


def _transposed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear(x, weight.t(), bias)


ALL_EXPERTS_FUNCTIONS.register(NAME, invariant_experts)


VECTORS = RowPadding(multiple=32)
"""For modules that compute more than products: PyTorch computes what is left over of a vector by another formula, and
32 rows leave nothing over."""


@dataclass(frozen=True)
class Product:
    """Rows by weights.

    Attributes:
        layer: maps `[rows, in]` to `[rows, out]`, or to several such tensors.
        features: size of its input.
        dtype: of its input.
        kind: the same for products that the same kernels compute.
    """

    layer: Callable[[torch.Tensor], Any]
    features: int
    dtype: torch.dtype
    kind: Hashable

    def padding(self) -> RowPadding | None:
        """What its rows need; see `padding_for`."""
        return padding_for(self.layer, self.features, self.dtype)


def pad_all(model: nn.Module, dtype: torch.dtype) -> None:
    """Pad the rows of every layer, after a trial of each distinct shape and dtype.

    Args:
        model: its layers are changed one by one.
        dtype: of the model, for layers whose weights do not tell.

    Raises:
        UnsupportedModelError: a layer rounds otherwise whatever the number of its rows; the message names it.
    """
    tried: dict[Hashable, RowPadding | None] = {}
    for name, layer in list(model.named_modules()):
        products = list(_products(layer, dtype))
        for product in products:
            if product.kind not in tried:
                with _weights_of_trial(layer):
                    tried[product.kind] = product.padding()
        paddings = [tried[product.kind] for product in products]
        if not paddings:
            continue
        more = _is_router(layer) or (_is_mixture(layer) and has_own_gate(layer))
        padding = _joined([*paddings, VECTORS] if more else paddings)
        if padding is None:
            what = f"layer {name!r} ({type(layer).__name__} in {dtype_name(products[0].dtype)})"
            raise UnsupportedModelError(
                f"{what} rounds a token otherwise beside other tokens, however many there are",
                "use the model as it is, or in another dtype",
            )
        if _is_mixture(layer):
            note_padding(layer, padding)
        else:
            pad_rows(layer, padding)


def lay_out(model: nn.Module, *, panels: bool) -> None:
    """Bring packed weights into panels, whose products give a row the same bits beside any others, or back again.

    Args:
        model: its layers packed in bfloat16 are changed one by one, where products of our own take them.
        panels: whether into panels.
    """
    pages = HugePages() if panels else None
    for layer in model.modules():
        if isinstance(layer, PackedLinear) and not isinstance(layer, Int8Linear):
            layer.lay_out(pages)


def has_mixtures(model: nn.Module) -> bool:
    """Whether some layers are mixtures of experts that transformers' interface serves."""
    return any(map(_is_mixture, model.modules()))


def _joined(paddings: list[RowPadding | None]) -> RowPadding | None:
    """A padding that does for all; None if there is none."""
    known = [padding for padding in paddings if padding is not None]
    if len(known) < len(paddings):
        return None
    least, multiple = max(each.least for each in known), max(each.multiple for each in known)
    most = min((each.most for each in known if each.most is not None), default=None)
    if most is not None:
        most = most // multiple * multiple
    return RowPadding(least, multiple, most) if most is None or max(least, multiple) <= most else None


def _is_mixture(layer: Any) -> bool:
    """By the names that transformers' decorator of experts gives."""
    return hasattr(layer, "_apply_gate") and hasattr(layer, "has_gate") and hasattr(layer, "is_transposed")


def _first_expert(experts: Any, name: str, rows: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = expert_product(experts, name, 0)(rows)
    return found


@contextmanager
def _weights_of_trial(layer: Any) -> Iterator[None]:
    """Give a module weights whose products with the trial's rows cancel out, while the context lasts.

    Weights that are no plain tensors, such as quantised ones, stay.
    """
    own, packed = dict(layer._parameters), vars(layer).get("_packed")
    first = isinstance(layer, Conv1D) or (_is_mixture(layer) and layer.is_transposed)
    try:
        if packed is not None:
            drawn = cancelling(torch.empty(layer.out_features, layer.in_features, dtype=layer.dtype))
            vars(layer)["_packed"] = in_panels(drawn, None, layer.panel) if layer.panel else packed_weight(drawn)
        for name, weight in own.items():
            if weight is None or type(weight.data) is not torch.Tensor or not weight.dtype.is_floating_point:
                continue
            if packed is not None and name == "weight":
                continue  # see above
            drawn = torch.zeros_like(weight) if "bias" in name else cancelling(weight, features_first=first)
            layer._parameters[name] = nn.Parameter(drawn, requires_grad=False)
        yield
    finally:
        layer._parameters.update(own)
        if packed is not None:
            vars(layer)["_packed"] = packed


def _is_router(layer: Any) -> bool:
    """Whether a module with a matrix is neither a linear layer nor an embedding nor a mixture."""
    weight = layer._parameters.get("weight")
    known = isinstance(layer, Conv1D) or hasattr(layer, "in_features") or hasattr(layer, "num_embeddings")
    return weight is not None and weight.ndim == 2 and not known and not _is_mixture(layer)


def _products(layer: Any, dtype: torch.dtype) -> Iterator[Product]:
    """What a module itself multiplies, its children left out."""
    if _is_mixture(layer):
        for name in ("gate_up_proj" if layer.has_gate else "up_proj", "down_proj"):
            weight = getattr(layer, name)
            features = weight.shape[1 if layer.is_transposed else 2]
            kind = (name, type(layer), weight.shape, weight.dtype)
            yield Product(partial(_first_expert, layer, name), features, weight.dtype, kind)
        return
    if isinstance(layer, Int8Linear):  # integer sums are exact, and a row's scale is its own
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
        yield Product(layer, features, given, (type(layer), *shape, given, getattr(layer, "bias", None) is not None))
