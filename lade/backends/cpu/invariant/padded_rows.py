"""Row padding of linear layers: pad a few rows so that they round like many, and find the padding by a trial.

Where other kernels take over for many rows, as on processors with AMX, many rows are fed in pieces, unless the layer is
packed in panels, whose product needs neither. Layers always get contiguous rows: PyTorch multiplies strided ones, such
as the last tokens of a batch's prompts, one by one, or adds the bias after rounding.

Sums in another order differ in the last bits of float32, which rounding to 16 bits hides but once in ten thousand
times. So the trial uses weights and inputs whose products cancel: the sum that is left consists of rounding errors
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lade.model.module_changes import Changed, change

_PADDING = "row_padding"
ROWS = (*range(1, 129), 200, 500)
"""Numbers of rows to compare in the trial."""
_SHIFTS = 64
_FEW, _SEVERAL = (1, 2, 4), (8, 16, 32)
_MANY, _LESS = (128, 96, 64), (48, 32)  # rows per call, where other kernels take over for many rows
_SIZE, _SPREAD = 16.0, 4
"""Magnitude of the trial's weights and inputs, large enough for float16, and its spread in powers of two."""
Layer = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class RowPadding:
    """Constraints on the number of rows that a layer is fed.

    Attributes:
        least: least number of rows.
        multiple: number that the rows must be a multiple of.
        most: most rows per call, a multiple of the others; more rows are fed in pieces. None for no limit.
    """

    least: int = 1
    multiple: int = 1
    most: int | None = None

    def fits(self, rows: int) -> bool:
        """Return True if this many rows need no padding; asked at every layer of every step."""
        return rows >= self.least and rows % self.multiple == 0 and (self.most is None or rows <= self.most)

    def pieces(self, rows: int) -> int:
        """Return the rows to feed per call."""
        return rows if self.most is None else self.most

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


def call_padded(layer: Callable[[torch.Tensor], Any], x: torch.Tensor, padding: RowPadding) -> Any:
    """Call a layer with rows of zeros appended to those of `x`, `[..., in]`; return its results for `x`."""
    rows = x.numel() // x.shape[-1]
    if rows > padding.pieces(rows):
        return _called_in_pieces(layer, x, padding)
    more = padding(rows)
    if not more:
        return layer(x.contiguous())
    found = layer(torch.nn.functional.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, more)))
    if isinstance(found, tuple):
        return tuple(each[:rows] for each in found)
    return found[:rows].view(*x.shape[:-1], found.shape[-1])


def _called_in_pieces(layer: Callable[[torch.Tensor], Any], x: torch.Tensor, padding: RowPadding) -> Any:
    """Compute `call_padded` for more rows than may be fed at a time."""
    rows = x.reshape(-1, x.shape[-1])
    found = [call_padded(layer, piece, padding) for piece in rows.split(padding.pieces(len(rows)))]
    if isinstance(found[0], tuple):
        return tuple(map(torch.cat, zip(*found, strict=True)))
    return torch.cat(found).view(*x.shape[:-1], found[0].shape[-1])


def pad_rows(layer: nn.Module, padding: RowPadding) -> None:
    """Pad the rows of a layer from now on."""
    change(layer, PaddedRows)
    note_padding(layer, padding)


def note_padding(layer: nn.Module, padding: RowPadding) -> None:
    """Record the padding of a layer."""
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

    Args:
        layer: maps `[rows, in]` to `[rows, out]`, or to several such tensors; its weights must be from `cancelling`.
        features: number of inputs of the layer.
        dtype: dtype of the inputs.
    """
    generator = torch.Generator().manual_seed(1)
    half = _drawn((max(ROWS) + _SHIFTS, features // 2), generator)
    x = torch.cat([half, -half, torch.zeros(len(half), features % 2, dtype=torch.float32, device="cpu")], 1)[
        :, _order(features)
    ]
    return next((padding for padding in PADDINGS if _rounds_alike(layer, x.to(dtype), padding)), None)


def cancelling(weight: torch.Tensor, *, features_first: bool = False) -> torch.Tensor:
    """Return weights in the shape and dtype of `weight`, whose products with the trial's rows cancel.

    Args:
        weight: tensor `[..., out, in]` whose shape and dtype to use.
        features_first: true if `weight` is `[..., in, out]`.
    """
    *shape, out, features = weight.mT.shape if features_first else weight.shape
    half = _drawn((*shape, out, features // 2), torch.Generator().manual_seed(0))
    drawn = torch.cat([half, half, torch.ones(*shape, out, features % 2, dtype=torch.float32, device="cpu")], -1)[
        ..., _order(features)
    ].to(weight.dtype)
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
    parts = (slice(first, first + rows) for rows in tried for first in _firsts(rows))
    return all(
        all(
            torch.equal(each, whole[part])
            for each, whole in zip(_outputs(layer, x[part], padding), expected, strict=True)
        )
        for part in parts
    )


def _firsts(rows: int) -> range:
    """Return the first rows of the passes of a size; few rows are tried at several places."""
    return range(rows * 7 % 8, _SHIFTS, max(8, min(_SHIFTS, 4 * rows)))


def _outputs(layer: Layer, x: torch.Tensor, padding: RowPadding) -> tuple[torch.Tensor, ...]:
    found = call_padded(layer, x, padding)
    return found if isinstance(found, tuple) else (found,)
