"""Pad a lone row of a linear layer so that it rounds as among others; find out by how many rows.

Where they take other kernels for many rows, too, as on processors with tiles (AMX), many rows are fed in pieces, unless
the layer is packed: then its product is one that needs neither (`packing/tiles.py`). Nor do layers ever see rows that
do not lie one behind the other, such as the last tokens of a batch's prompts: PyTorch multiplies these one by one, or
adds the bias after it has rounded.

Sums in another order differ in float32's last places, which 16 bits round away but once in ten thousand times. So what
is tried are weights and inputs whose products cancel out: all that is left of a sum is what was rounded in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lade.model.in_place_subclassing import Changed, change

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


ROWS = (*range(1, 129), 200, 500)
"""Numbers of rows that are compared."""
_SHIFTS = 64
_FEW, _SEVERAL = (1, 2, 4), (8, 16, 32)
_MANY, _LESS = (128, 96, 64), (48, 32)  # rows at a time, where there are kernels for many rows
PADDINGS = (
    *(RowPadding(least, multiple) for least in _FEW for multiple in sorted({1, least})),
    *(RowPadding(each, each, most) for each in _FEW for most in _MANY),
    *(RowPadding(each, each) for each in _SEVERAL),
    *(RowPadding(each, each, most) for each in _FEW for most in _LESS),
    *(RowPadding(each, each, most) for each in _SEVERAL for most in (*_MANY, *_LESS) if most % each == 0),
    *(RowPadding(least) for least in (64, 128)),  # of tiny layers, which have kernels of their own
)
"""What is tried, the cheapest first."""
_SIZE, _SPREAD = 16.0, 4
"""Of weights and inputs: what is left of a sum is then not too small for float16. They are up to so many powers of
two larger or smaller."""

Layer = Callable[[torch.Tensor], Any]


@torch.no_grad()
def padding_for(layer: Layer, features: int, dtype: torch.dtype) -> RowPadding | None:
    """The cheapest padding with which a layer gives a row the same bits in every pass; None if there is none.

    Args:
        layer: maps `[rows, in]` to `[rows, out]`, or to several such tensors; its weights are `cancelling` ones.
        features: size of its input.
        dtype: of its input.
    """
    generator = torch.Generator().manual_seed(1)
    half = _drawn((max(ROWS) + _SHIFTS, features // 2), generator)
    x = torch.cat([half, -half, torch.zeros(len(half), features % 2)], 1)[:, _order(features)]
    return next((padding for padding in PADDINGS if _rounds_alike(layer, x.to(dtype), padding)), None)


def cancelling(weight: torch.Tensor, *, features_first: bool = False) -> torch.Tensor:
    """Weights of the shape and dtype of others, `[..., out, in]`, whose products with the trial's rows cancel out.

    Args:
        weight: the others.
        features_first: whether they are `[..., in, out]`.
    """
    *shape, out, features = weight.mT.shape if features_first else weight.shape
    half = _drawn((*shape, out, features // 2), torch.Generator().manual_seed(0))
    drawn = torch.cat([half, half, torch.ones(*shape, out, features % 2)], -1)[..., _order(features)].to(weight.dtype)
    return drawn.mT.contiguous() if features_first else drawn


def _drawn(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Numbers of very different sizes: sums of numbers of eight bits that are all alike would not be rounded."""
    sizes = torch.randint(-_SPREAD, _SPREAD + 1, tuple(shape), generator=generator)
    return torch.ldexp(_SIZE * torch.randn(tuple(shape), generator=generator), sizes)


def _order(features: int) -> torch.Tensor:
    return torch.randperm(features, generator=torch.Generator().manual_seed(2))


def _rounds_alike(layer: Layer, x: torch.Tensor, padding: RowPadding) -> bool:
    """Whether rows `[N, in]` have the same bits in every pass over some of them, wherever in it they stand."""
    expected = _outputs(layer, x, padding)
    tried = (rows for rows in ROWS if padding.most is None or rows <= padding.most)  # more are fed as so many
    parts = (slice(first, first + rows) for rows in tried for first in _firsts(rows))
    return all(
        all(
            torch.equal(each, whole[part])
            for each, whole in zip(_outputs(layer, x[part], padding), expected, strict=True)
        )
        for part in parts
    )


def _firsts(rows: int) -> range:
    """Where passes of so many rows begin: a few rows are tried at several places."""
    return range(rows * 7 % 8, _SHIFTS, max(8, min(_SHIFTS, 4 * rows)))


def _outputs(layer: Layer, x: torch.Tensor, padding: RowPadding) -> tuple[torch.Tensor, ...]:
    found = call_padded(layer, x, padding)
    return found if isinstance(found, tuple) else (found,)
