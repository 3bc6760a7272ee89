"""Products of int8 codes, by oneDNN: exact sums of integers, times the scales of the weights."""

from __future__ import annotations

import torch

from lade.model.packing.codes import ZERO_POINT

ROWS_PACKED_FOR = 4
"""The rows that oneDNN is told of when it chooses a layout; without any it has none for some shapes."""
FEW_RESULTS, MANY_ROWS = 256, 33
"""Up to so many results, of fewer rows, oneDNN keeps from its tiles (AMX) and, of signed inputs, multiplies one by one,
a hundred times as slowly."""


def prepacked(values: torch.Tensor) -> torch.Tensor:
    """Codes `[out, in]` in oneDNN's layout, as a tensor `[in, out]`."""
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(values.contiguous(), [ROWS_PACKED_FOR, values.shape[1]])
    return packed


def multiplied(codes: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Integer sums times `scale`; exact where `input_dtype` has tried it.

    Args:
        codes: `[..., in]` uint8 or int8, contiguous; see `quantised`.
        packed: of `prepacked`.
        scale: `[out]` float32, of the weights.
        zeros: `[out]` int32, where the weights have their zero.

    Returns:
        `[..., out]` float32.
    """
    if codes.dtype == torch.uint8:
        return _product(codes, ZERO_POINT, packed, scale, zeros)
    inputs, outputs = packed.shape
    rows = codes.numel() // inputs
    more = fewest_rows(outputs) - rows
    if more <= 0:
        return _product(codes, 0, packed, scale, zeros)
    padded = torch.nn.functional.pad(codes.view(rows, inputs), (0, 0, 0, more))
    return _product(padded, 0, packed, scale, zeros)[:rows].view(*codes.shape[:-1], outputs)


def fewest_rows(outputs: int) -> int:
    """How many rows of signed inputs to multiply at least, for the sake of speed."""
    return min(FEW_RESULTS // outputs + 1, MANY_ROWS)


def _product(
    codes: torch.Tensor, zero_point: int, packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        codes, 1.0, zero_point, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y
