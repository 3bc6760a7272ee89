"""Tensors of GGUF files: the codes of their blocks as packed layers take them, and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lade.backends.cpu.packing.blocks import BlockCodes
from lade.backends.cpu.packing.gguf_file import TensorPlace

_Blocks = torch.Tensor  # [out, blocks, bytes] uint8


def codes_of(raw: torch.Tensor, kind: str) -> BlockCodes:
    """Return the codes of a matrix, of a type that has them.

    Args:
        raw: `[out, bytes]` uint8, as the file has it.
        kind: name of the type, such as "Q4_K".
    """
    size, reader = _KINDS[kind]
    return reader(raw.view(len(raw), -1, size))


def has_codes(kind: str) -> bool:
    """Return True if kernels take matrices of a type."""
    return kind in _KINDS


def values_of(raw: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    """Return the values of a tensor of any type, float32, from its bytes `[..., bytes]` uint8."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Any = dequantize(raw.numpy(), GGMLQuantizationType(place.kind))
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(place.shape)


def _half(blocks: _Blocks, first: int) -> torch.Tensor:
    """Return a float16 number of each block, `[out, blocks]`."""
    return blocks[..., first : first + 2].contiguous().view(torch.float16).squeeze(-1)


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Return the low halves of bytes `[..., n]`, and then the high ones: `[..., 2 * n]`."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _q8_0(blocks: _Blocks) -> BlockCodes:
    return BlockCodes("q8_0", 8, (blocks[..., 2:] ^ 128).flatten(1), _half(blocks, 0))


def _q4_0(blocks: _Blocks) -> BlockCodes:
    return BlockCodes("q4_0", 4, _halves(blocks[..., 2:]).flatten(1), _half(blocks, 0))


def _q4_1(blocks: _Blocks) -> BlockCodes:
    return BlockCodes("q4_1", 4, _halves(blocks[..., 4:]).flatten(1), _half(blocks, 0), _half(blocks, 2))


def _scales_and_minima(blocks: _Blocks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 6-bit scales and minima of eight groups of each block, `[out, 8 * blocks]` uint8."""
    packed = blocks[..., 4:16]
    scale, minimum, both = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat([scale & 63, both & 15 | scale >> 6 << 4], -1)
    minima = torch.cat([minimum & 63, both >> 4 | minimum >> 6 << 4], -1)
    return scales.flatten(1), minima.flatten(1)


def _q4_k(blocks: _Blocks) -> BlockCodes:
    scales, minima = _scales_and_minima(blocks)
    values = _halves(blocks[..., 16:].unflatten(-1, (4, 32)))
    return BlockCodes("q4_k", 4, values.flatten(1), scales, minima, _half(blocks, 0), -_half(blocks, 2))


def _q5_k(blocks: _Blocks) -> BlockCodes:
    scales, minima = _scales_and_minima(blocks)
    low = _halves(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32)).flatten(-3, -2)  # [.., 8, 32]
    bit = torch.arange(8, dtype=torch.uint8, device="cpu").view(8, 1)
    high = (blocks[..., None, 16:48] >> bit & 1) << 4
    return BlockCodes("q5_k", 8, (low | high).flatten(1), scales, minima, _half(blocks, 0), -_half(blocks, 2))


def _q6_k(blocks: _Blocks) -> BlockCodes:
    low = blocks[..., :128].unflatten(-1, (2, 1, 64))
    low = torch.cat([low & 15, low >> 4], -2).flatten(-2)  # [.., 2, 128]
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device="cpu").view(4, 1)
    high = (blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shift & 3).flatten(-2) << 4  # [.., 2, 128]
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return BlockCodes("q6_k", 8, ((low | high) + 96).flatten(1), scales, None, _half(blocks, 208))


def _fifth_bits(blocks: _Blocks, first: int) -> torch.Tensor:
    """Return codes of five bits, `[out, in]`: 32 high bits from byte `first` on, and then the halves."""
    bit = torch.arange(8, dtype=torch.uint8, device="cpu")
    high = (blocks[..., first : first + 4, None] >> bit & 1).flatten(-2) << 4
    return (_halves(blocks[..., first + 4 :]) | high).flatten(1)


def _q5_0(blocks: _Blocks) -> BlockCodes:
    return BlockCodes("q8_0", 8, _fifth_bits(blocks, 2) + 112, _half(blocks, 0))  # 16 stands for zero


def _q5_1(blocks: _Blocks) -> BlockCodes:
    return BlockCodes("q5_1", 8, _fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2))


def _q3_k(blocks: _Blocks) -> BlockCodes:
    pair = torch.arange(4, dtype=torch.uint8, device="cpu").view(4, 1)
    low = blocks[..., 32:96].unflatten(-1, (2, 1, 32)) >> 2 * pair & 3  # [.., 2, 4, 32]
    high = (
        blocks[..., :32].unflatten(-1, (1, 1, 32)) >> torch.arange(8, dtype=torch.uint8, device="cpu").view(2, 4, 1) & 1
    )
    packed = blocks[..., 96:108]
    scale = _halves(packed[..., :8]) | (packed[..., None, 8:] >> 2 * pair & 3).flatten(-2) << 4
    scales = (scale.to(torch.int8) - 32).flatten(1)
    return BlockCodes("q6_k", 8, (low | high << 2).flatten(1) + 124, scales, factor=_half(blocks, 108))


def _iq4_nl(blocks: _Blocks) -> BlockCodes:
    return BlockCodes("q8_0", 8, _NONLINEAR[_halves(blocks[..., 2:]).int()].flatten(1), _half(blocks, 0))


def _iq4_xs(blocks: _Blocks) -> BlockCodes:
    pair = torch.arange(4, dtype=torch.uint8, device="cpu")
    low = (blocks[..., 4:8, None] >> 4 * pair[:2] & 15).flatten(-2)
    scale = low | (blocks[..., 2:4, None] >> 2 * pair & 3).flatten(-2) << 4
    scales = (scale.to(torch.int8) - 32).repeat_interleave(2, -1).flatten(1)  # of 16 inputs each
    values = _NONLINEAR[_halves(blocks[..., 8:].unflatten(-1, (8, 16))).int()]
    return BlockCodes("q6_k", 8, values.flatten(1), scales, factor=_half(blocks, 0))


_NONLINEAR = torch.tensor(
    [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], dtype=torch.uint8, device="cpu"
)
"""Values of IQ4's codes; 128 stands for zero."""
_KINDS: dict[str, tuple[int, Callable[[_Blocks], BlockCodes]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q3_K": (110, _q3_k),
    "IQ4_NL": (18, _iq4_nl),
    "IQ4_XS": (136, _iq4_xs),
}
"""Bytes of a block, and what reads it, by type."""
