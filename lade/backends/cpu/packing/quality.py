"""Quality of int8 and int4 models: perplexity, and the error of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, nan, sqrt
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lade.backends.cpu.packing.integers import Int8Linear


@dataclass(frozen=True)
class LayerError:
    """Relative error of an int8 or int4 layer: root of the sum of squared errors over that of the original values.

    Attributes:
        name: name of the layer in the model.
        weights: relative error of the weights.
        outputs: relative error of the outputs, for the inputs that the layer gets in the model.
    """

    name: str
    weights: float
    outputs: float


@dataclass
class _Sums:
    """Running sums of squared errors and of squared reference values."""

    error: float = 0.0
    size: float = 0.0

    def add(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        self.error += (found.float() - expected.float()).square().sum().item()
        self.size += expected.float().square().sum().item()

    @property
    def relative(self) -> float:
        return sqrt(self.error / self.size) if self.size else nan


@torch.no_grad()
def perplexity(model: PreTrainedModel, ids: Sequence[int], window: int) -> float:
    """Return the exponential of the mean loss per token, each conditioned on the tokens before it in its window.

    Args:
        model: a causal language model.
        ids: token ids of a text, at least two.
        window: tokens per pass; each window starts without context.
    """
    loss, tokens = 0.0, 0
    for start in range(0, len(ids) - 1, window):
        piece = torch.tensor([ids[start : start + window]], device=model.device, dtype=torch.int64)  # [1, T]
        if piece.shape[1] > 1:
            logits: Any = model(input_ids=piece, use_cache=False).logits[0, :-1].float()  # [T - 1, V]
            loss += nn.functional.cross_entropy(logits, piece[0, 1:], reduction="sum").item()
            tokens += piece.shape[1] - 1
    return exp(loss / tokens)


@contextmanager
def watched(model: nn.Module) -> Iterator[list[LayerError]]:
    """Compare int8 and int4 layers with the original ones in every pass in the context; its end fills the list.

    Args:
        model: a model packed with `keep_original=True`.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    sums = {layer: _Sums() for layer in layers.values()}

    def compare(layer: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        sums[layer].add(output, nn.functional.linear(arguments[0], layer.kept_weight(), layer.bias))

    handles = [layer.register_forward_hook(compare) for layer in layers.values()]
    errors: list[LayerError] = []
    try:
        yield errors
    finally:
        for handle in handles:
            handle.remove()
    errors += [LayerError(name, _weights(layer), sums[layer].relative) for name, layer in layers.items()]


@torch.no_grad()
def _weights(layer: Int8Linear) -> float:
    sums = _Sums()
    sums.add(layer.codes().dense(torch.float32), layer.kept_weight())
    return sums.relative
