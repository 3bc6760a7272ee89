"""GGUF files: the header with metadata and the places of tensors, and the codes and values of tensors.

A file may be a stranger's, and damaged. So every count, length and offset is compared with the size of the file before
anything is allocated or read by it, and other readers get files that have passed.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lade.backends.cpu.packing.blocks import BlockCodes
from lade.errors import InputError

MAGIC, SUFFIX = b"GGUF", ".gguf"
VERSIONS = (2, 3)
_TYPES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST_NAME, _LONGEST_STRING, _LONGEST_ELEMENT = 2**8, 2**20, 2**12  # bytes; names and tokens are short
_MOST_DIMENSIONS, _LARGEST_ALIGNMENT, _LARGEST_NUMBER = 4, 2**16, 2**31
_SHAPES = ("embedding_length", "feed_forward_length", "rope.dimension_count", "attention.key_length",
           "attention.value_length", "attention.head_count", "attention.head_count_kv")  # fmt: skip


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]  # outermost first
    kind: str  # name of its type, see `gguf.GGMLQuantizationType`
    offset: int  # bytes from the beginning of the file
    nbytes: int  # bytes of its numbers


@dataclass
class Header:
    """Metadata of a file, and its tensors, by their names."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)  # of an array its `Elements`
    tensors: dict[str, TensorPlace] = field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """Name of the architecture, such as "llama"."""
        return str(self.values["general.architecture"])


class Elements(int):
    """The number of elements of an array that was not read."""


class _Damaged(Exception):
    """A file that is not what it says."""


class _Reader:
    """Reads numbers and strings one after the other, never past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.place = data, 0

    def left(self) -> int:
        return len(self._data) - self.place

    def numbers(self, layout: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{layout}")
        self.skip(size, "a number")
        return struct.unpack_from(f"<{layout}", self._data, self.place - size)

    def need(self, size: int, what: str) -> None:
        if size > self.left():
            raise _Damaged(f"{what} at byte {self.place:,} needs {size:,} bytes, but {self.left():,} are left")

    def skip(self, size: int, what: str) -> None:
        self.need(size, what)
        self.place += size

    def string(self, most: int) -> str:
        (size,) = self.numbers("Q")
        if size > most:
            raise _Damaged(f"a string at byte {self.place:,} has {size:,} bytes, more than {most:,}")
        self.skip(size, "a string")
        text = self._data[self.place - size : self.place]
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise _Damaged(f"a string before byte {self.place:,} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """Read a value, or skip an array."""
        if kind == _STRING:
            return self.string(_LONGEST_STRING)
        if kind == _ARRAY:
            return self._array()
        if kind not in _TYPES:
            raise _Damaged(f"a value at byte {self.place:,} has the type {kind}, which does not exist")
        return self.numbers(_TYPES[kind])[0]

    def _array(self) -> Elements:
        kind, count = self.numbers("IQ")
        if kind in _TYPES:
            self.skip(count * struct.calcsize(_TYPES[kind]), f"an array of {count:,} numbers")
        elif kind == _STRING:
            self.need(8 * count, f"an array of {count:,} strings")
            for _ in range(count):
                self.string(_LONGEST_ELEMENT)
        else:
            raise _Damaged(f"an array before byte {self.place:,} has elements of type {kind}")
        return Elements(count)


def gguf_file(path: Path) -> Path | None:
    """Return a GGUF file by its path, or by that of a folder with one and no config.json; None if it is none."""
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob(f"*{SUFFIX}"))
        return files[0] if len(files) == 1 else None
    return path if path.is_file() and path.suffix == SUFFIX else None


def read_header(path: Path) -> Header:
    """Read the header of a file; requires the `gguf` package.

    Raises:
        InputError: the file cannot be read, is not in GGUF, is damaged, or is one of several parts.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise _Damaged("it does not begin with GGUF")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(Header(path), _Reader(data))
    except _Damaged as problem:
        raise InputError(f"model file {str(path)!r} is damaged, or no GGUF file: {problem}") from None
    except OSError as problem:
        raise InputError(f"model file {str(path)!r} cannot be read: {problem.strerror}") from problem


def _read(header: Header, reader: _Reader) -> Header:
    reader.skip(len(MAGIC), "the magic")
    version, tensors, values = reader.numbers("IQQ")
    if version not in VERSIONS:
        raise _Damaged(f"its version is {version}, and this reads {' and '.join(map(str, VERSIONS))}")
    reader.need(12 * values + 24 * tensors, f"{values:,} values and {tensors:,} tensors")
    for _ in range(values):
        name = reader.string(_LONGEST_NAME)
        if name in header.values:
            raise _Damaged(f"{name!r} is given twice")
        header.values[name] = reader.value(*reader.numbers("I"))
    found = [_tensor(reader) for _ in range(tensors)]
    _check_values(header.values, found)
    alignment = header.values.get("general.alignment", 32)
    first = -(-reader.place // alignment) * alignment
    for each in found:
        if each.offset % alignment or first + each.offset + each.nbytes > reader.place + reader.left():
            raise _Damaged(f"tensor {each.name!r} does not lie within it: it may not be wholly downloaded")
        if each.name in header.tensors:
            raise _Damaged(f"tensor {each.name!r} is there twice")
        header.tensors[each.name] = replace(each, offset=first + each.offset)
    return header


def _tensor(reader: _Reader) -> TensorPlace:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    sizes: Any = GGML_QUANT_SIZES  # by members of an IntEnum
    name = reader.string(_LONGEST_NAME)
    (dimensions,) = reader.numbers("I")
    if not 0 < dimensions <= _MOST_DIMENSIONS:
        raise _Damaged(f"tensor {name!r} has {dimensions} dimensions")
    *shape, kind, offset = reader.numbers(f"{dimensions}QIQ")
    if not 0 < prod(shape) < 2**40 or max(shape) >= _LARGEST_NUMBER:
        raise _Damaged(f"tensor {name!r} has the shape {shape}")
    block, size = sizes.get(kind, (0, 0))
    if not block or shape[0] % block:
        raise _Damaged(
            f"tensor {name!r} has rows of {shape[0]} numbers of type {kind}, which is unknown or does not fit"
        )
    nbytes = prod(shape) // block * size
    return TensorPlace(name, tuple(reversed(shape)), GGMLQuantizationType(kind).name, offset, nbytes)


def _check_values(values: dict[str, Any], tensors: list[TensorPlace]) -> None:
    """Raise for values that others would allocate memory by, or loop over."""
    architecture = values.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise _Damaged("it has no general.architecture")
    if values.get("split.count", 1) not in (0, 1):
        raise _Damaged("it is one of several parts: join them, with  llama-gguf-split --merge")
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= _LARGEST_ALIGNMENT or alignment % 8:
        raise _Damaged(f"general.alignment is {alignment}")
    largest = max((size for each in tensors for size in each.shape), default=0)
    limits = {f"{architecture}.{name}": largest for name in _SHAPES} | {f"{architecture}.block_count": len(tensors)}
    for name, value in values.items():
        own = name.startswith(f"{architecture}.") and isinstance(value, int)
        if own and not -_LARGEST_NUMBER < value <= limits.get(name, _LARGEST_NUMBER):
            raise _Damaged(f"{name} is {value}, which its tensors cannot have")


_Blocks = torch.Tensor  # [out, blocks, bytes] uint8


def codes_of(raw: torch.Tensor, kind: str) -> BlockCodes:
    """Return the codes of a matrix, `[out, bytes]` uint8 as the file has it, of a type that has them, as "Q4_K"."""
    size, reader = _KINDS[kind]
    return reader(raw.view(len(raw), -1, size))


def has_codes(kind: str) -> bool:
    """Return True if kernels take matrices of a type."""
    return kind in _KINDS


def values_of(raw: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    """Return the values of a tensor of any type, float32, from its bytes `[..., bytes]` uint8."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values: Any = dequantize(raw.numpy(), GGMLQuantizationType[place.kind])
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
    bit = torch.arange(8, dtype=torch.uint8, device="cpu").view(2, 4, 1)
    high = blocks[..., :32].unflatten(-1, (1, 1, 32)) >> bit & 1
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
