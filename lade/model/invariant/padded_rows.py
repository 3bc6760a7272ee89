"""Layers that are fed rows of zeros beside a lone row, since matrix products take other kernels for a few rows.

Where they take other kernels for many rows, too, as on processors with tiles (AMX), many rows are fed in pieces, unless
the layer is packed: then its product is one that needs neither (`packing/tiles.py`). Nor do layers ever see rows that
do not lie one behind the other, such as the last tokens of a batch's prompts: PyTorch multiplies these one by one, or
adds the bias after it has rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lade.model.class_change import Changed, change

_PADDING = "row_padding"


@dataclass(frozen=True)
class RowPadding:
    """How many rows a layer is fed.

    Attributes:
        least: at least so many.
        multiple: a multiple of this.
        most: at most so many at a time, and more in pieces of so many; a multiple of the others. None for no limit.
    """

    least: int = 1
    multiple: int = 1
    most: int | None = None

    def fits(self, rows: int) -> bool:
        """Whether as many are fed as they are, which a step asks at every layer."""
        return rows >= self.least and rows % self.multiple == 0 and (self.most is None or rows <= self.most)

    def pieces(self, rows: int) -> int:
        """How many rows of as many to feed at a time."""
        return rows if self.most is None else self.most

    def __call__(self, rows: int) -> int:
        """How many rows to add to as many."""
        return max(self.least, -(-rows // self.multiple) * self.multiple) - rows


NO_PADDING = RowPadding()


class PaddedRows(Changed):
    """Mixed into the class of a layer that maps `[..., in]` to `[..., out]`, or to several tensors `[rows, ...]`."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer without padding."""
        layer, padding = super().forward, padding_of(self)
        if padding.fits(x.numel() // x.shape[-1]):
            return layer(x.contiguous(), *args, **kwargs)
        return call_padded(lambda rows: layer(rows, *args, **kwargs), x, padding)


def call_padded(layer: Callable[[torch.Tensor], Any], x: torch.Tensor, padding: RowPadding) -> Any:
    """Call a layer with rows of zeros behind those of `x`, `[..., in]`, and return what it makes of the latter."""
    rows = x.numel() // x.shape[-1]
    if rows > padding.pieces(rows):
        return _called_in_pieces(layer, x, padding)
    more = padding(rows)
    if not more:
        return layer(x.contiguous())
    found = layer(torch.nn.functional.pad(x.reshape(rows, -1), (0, 0, 0, more)))
    if isinstance(found, tuple):
        return tuple(each[:rows] for each in found)
    return found[:rows].view(*x.shape[:-1], found.shape[-1])


def _called_in_pieces(layer: Callable[[torch.Tensor], Any], x: torch.Tensor, padding: RowPadding) -> Any:
    """As `call_padded`, of more rows than may be fed at a time."""
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
    """Let a layer know the padding that what it is made of needs."""
    layer.__dict__[_PADDING] = padding


def forget_padding(model: nn.Module) -> None:
    """Take the notes off all layers of a model."""
    for layer in model.modules():
        layer.__dict__.pop(_PADDING, None)


def padding_of(layer: nn.Module) -> RowPadding:
    """The padding of a layer; none of one that is not padded."""
    padding: RowPadding = layer.__dict__.get(_PADDING, NO_PADDING)
    return padding
