"""Linear layers with weights in int8, int4 or the codes of a GGUF file and inputs rounded to int8, and what they lose.

Every 32 numbers share a scale. Int8 has the grid and the bits of llama.cpp's Q8_0, and int4 those of Q4_0; which takes
its scale from the largest magnitude, where here the best of a few scales is taken, refitted by least squares. Sums are
exact and scaling rounds in the same steps everywhere, see `BlockCodes`: a row does not depend on the other rows.

One scale per output and one per token, as in Dettmers et al., "LLM.int8()" (2022), and Xiao et al., "SmoothQuant"
(2022), lose ten times as much: a few large inputs of a token leave the others few steps.

The loss is told by perplexities, and by the error of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, nan, sqrt
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from lade.backends.cpu.kernels import is_plain
from lade.backends.cpu.packing.blocks import GROUP, LARGEST, TINY, BlockCodes
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.weight import UNPACK_REMEDY, HugePages, PackedWeight, state_of
from lade.errors import UnsupportedModelError

_CHUNK = 2**18  # weights that are rounded at a time, which a core's cache holds
_LEVELS = (6.8, 7.4, 8.0, 8.6)  # int4 codes, unrounded, that the largest magnitude of a group is tried at
_Rounding = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From weights `[out, groups, 32]` float32 to whole numbers of this shape, and scales `[out, groups, 1]`."""


def int8_codes(weight: torch.Tensor) -> BlockCodes:
    """Round a weight `[out, in]` to int8; the largest magnitude of every 32 inputs becomes 127."""
    return _rounded("int8", 8, _in_int8, weight)


def int4_codes(weight: torch.Tensor) -> BlockCodes:
    """Round a weight `[out, in]` to int4."""
    return _rounded("int4", 4, _in_int4, weight)


def _rounded(name: str, bits: int, rounding: _Rounding, weight: torch.Tensor) -> BlockCodes:
    """Round a weight `[out, in]`, a few outputs at a time."""
    inputs, values, scales = weight.shape[1], list[torch.Tensor](), list[torch.Tensor]()
    for part in weight.split(max(1, _CHUNK // max(1, inputs))):
        codes, scale = rounding(pad(part.float(), (0, -inputs % GROUP)).view(len(part), -1, GROUP))
        values.append(codes.flatten(1)[:, :inputs].add_(2 ** (bits - 1)).to(torch.uint8))
        scales.append(scale.flatten(1).bfloat16())
    return BlockCodes(name, bits, torch.cat(values), torch.cat(scales))


def _in_int8(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = grouped.abs().amax(-1, keepdim=True).div_(LARGEST).bfloat16()
    return (grouped / scale.float().clamp_min_(TINY)).round_().clamp_(-LARGEST, LARGEST), scale


def pairs_of(codes: BlockCodes) -> torch.Tensor:
    """Return two 4-bit codes per byte, the first in the low half: `[out, ceil(in / 2)]` uint8."""
    values = pad(codes.values, (0, codes.values.shape[1] % 2))
    return values[:, ::2] | values[:, 1::2] << 4


def out_of_pairs(pairs: torch.Tensor, scale: torch.Tensor, inputs: int) -> BlockCodes:
    """Invert `pairs_of`, for a weight of `inputs` inputs."""
    values = torch.stack([pairs & 15, pairs >> 4], -1).flatten(1)
    return BlockCodes("int4", 4, values[:, :inputs].contiguous(), scale)


def _in_int4(grouped: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True))  # signed
    best_error = torch.full_like(largest, torch.inf)
    best = torch.zeros_like(grouped)
    best_scale = torch.zeros_like(largest)
    for level in _LEVELS:
        inverse = torch.where(largest == 0, 0, -level / largest)
        codes = (grouped * inverse).round_().clamp_(-8, 7)
        squares = codes.square().sum(-1, keepdim=True).clamp_min_(1)
        scale = (grouped * codes).sum(-1, keepdim=True).div_(squares).bfloat16().float()
        error = (codes * scale).sub_(grouped).square_().sum(-1, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best, best_scale = torch.where(better, codes, best), torch.where(better, scale, best_scale)
    return best, best_scale


class Int8Linear(PackedLinear):
    """A linear layer with int8 weights, one scale per output and 32 inputs, and inputs with one scale per 32.

    Arguments are those of `PackedLinear`, and the codes of the layer's weight, if they are known.

    Attributes:
        weight: the layer's own parameter if it is kept; otherwise an int8 parameter, in panels or, without the library,
            the codes.
    """

    WEIGHTS: ClassVar[str] = "int8"  # name of the weights' format, as `lade.pack` takes it
    codes_of = staticmethod(int8_codes)
    _codes: BlockCodes  # on the meta device for a weight in panels
    _memory: HugePages

    def __init__(
        self, layer: nn.Module, *, keep: bool, codes: BlockCodes | None = None, pages: HugePages | None = None
    ) -> None:
        self.__dict__.update(_given=codes, _memory=pages or HugePages())
        super().__init__(layer, keep=keep)

    @torch.no_grad()
    def _pack_weight(self) -> None:
        """Create the packed tensor, and free the dense `weight` unless it is kept."""
        weight: Any = self._parameters["weight"]
        codes = self.__dict__.pop("_given", None) or self.codes_of(self._turned(weight.detach()))
        panel_weight = codes.in_panels(self._memory)
        packed = codes.values if panel_weight is None else panel_weight.panels
        codes = codes if panel_weight is None else codes.without_values()
        self.__dict__.update(_packed=packed, _panel_weight=panel_weight, _codes=codes)
        if not self.keeps_original:
            integers = PackedWeight(packed, requires_grad=False)  # integers have no gradients
            integers.__dict__.update(weight.__dict__)
            self._parameters["weight"] = integers
        self._packed_state = state_of(weight)

    def codes(self) -> BlockCodes:
        """Return the weight's codes; a copy of those in panels."""
        return self._codes if self._panel_weight is None else self._codes.out_of_panels(self._panel_weight)

    def kept_weight(self) -> torch.Tensor:
        """Return the original weight, `[out, in]`; requires `keeps_original`."""
        weight: Any = self._parameters["weight"]
        return self._turned(weight)

    def dense_weight(self) -> torch.Tensor:
        """Return the dequantised weight in the layer's dtype, which differs from the original weight."""
        return self._turned(self.codes().dense(self.dtype))

    @property
    def format(self) -> str:
        """Format of the codes, see `BlockCodes`."""
        return self._codes.name

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and their scales."""
        if self._panel_weight is not None:
            return self._packed.nbytes
        return sum(each.nbytes for each in self._codes.tensors().values())

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not is_plain(x):
            raise UnsupportedModelError(
                f"a layer packed in {self.WEIGHTS} for the CPU was given a {type(x).__name__} on {x.device}",
                "give it an ordinary tensor on the CPU",
            )
        bias = self._parameters["bias"]
        if self._panel_weight is not None:
            return self._panel_weight.product(x, bias)
        product: torch.Tensor = self._codes.product(x, bias, x.dtype)
        return product

    def __getstate__(self) -> dict[str, Any]:
        """Store the codes: the packed layout cannot be copied, and another process may have no library."""
        state = {**self.__dict__, "_given": self.codes()}
        del state["_packed"], state["_panel_weight"], state["_codes"]
        if not self.keeps_original:
            state["_parameters"] = self._without_values()
        return state


class Int4Linear(Int8Linear):
    """A linear layer with int4 weights, one scale per output and 32 inputs, and inputs with one scale per 32."""

    WEIGHTS: ClassVar[str] = "int4"
    codes_of = staticmethod(int4_codes)


class GgufLinear(Int8Linear):
    """A linear layer with the codes of a tensor in a GGUF file."""

    WEIGHTS: ClassVar[str] = "gguf"

    @staticmethod
    def codes_of(weight: torch.Tensor) -> BlockCodes:
        """Refuse to round a weight that was written to: the codes are those of the file."""
        raise UnsupportedModelError("a weight from a GGUF file was changed", UNPACK_REMEDY)


@dataclass(frozen=True)
class LayerError:
    """Relative error of an int8 or int4 layer: root of the sum of squared errors over that of the original values."""

    name: str  # in the model
    weights: float
    outputs: float  # for the inputs that the layer gets in the model


@torch.no_grad()
def _squares(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the sum of squared errors, and that of squared expected values: `[2]` float64."""
    return torch.stack([each.float().square().sum().double() for each in (found.float() - expected, expected)])


def _relative(squares: torch.Tensor) -> float:
    error, size = squares.tolist()
    return sqrt(error / size) if size else nan


@torch.no_grad()
def perplexity(model: PreTrainedModel, ids: Sequence[int], window: int) -> float:
    """Return the exponential of the mean loss per token of a text of two or more, read in windows without context."""
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
    """Compare int8 and int4 layers with the originals, which the model keeps, in every pass; the end fills the list."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    sums = {layer: torch.zeros(2, dtype=torch.float64, device="cpu") for layer in layers.values()}

    def compare(layer: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        sums[layer] += _squares(output, nn.functional.linear(arguments[0], layer.kept_weight(), layer.bias))

    handles = [layer.register_forward_hook(compare) for layer in layers.values()]
    errors: list[LayerError] = []
    try:
        yield errors
    finally:
        for handle in handles:
            handle.remove()
    for name, layer in layers.items():
        of_weights = _squares(layer.codes().dense(torch.float32), layer.kept_weight())
        errors.append(LayerError(name, _relative(of_weights), _relative(sums[layer])))
