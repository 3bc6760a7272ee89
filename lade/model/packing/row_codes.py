"""Inputs of int8 layers rounded to codes, and laid out for products of our own."""

from __future__ import annotations

import torch

from lade.model.kernels.codes import CODES, Coding, code_rows
from lade.model.kernels.kinds import kind_of
from lade.model.worker_threads import in_team

_MANY_INPUTS = 2**15  # that are worth a thread of their own
_SHARES = 4  # parts for each thread, which may be held up


def coded(x: torch.Tensor, together: int, room: int, zero: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round inputs as `quantised` in codes.py does.

    Args:
        x: `[..., in]`, float32, bfloat16 or float16.
        together: how many rows lie together, see `Coding`.
        room: for how many rows there is to be room.
        zero: 0 for signed codes, 128 for unsigned ones.

    Returns:
        Codes as `Coding` lays them out, and what a step of each row is worth, `[rows]` float32.
    """
    x, inputs = x.contiguous(), x.shape[-1]
    rows = x.numel() // inputs
    codes = torch.empty(room * -(-inputs // CODES) * CODES, dtype=torch.int8)
    scales = torch.empty(rows)
    places = x.data_ptr(), kind_of(x.dtype), codes.data_ptr(), scales.data_ptr()
    parts = max(1, min(rows, _SHARES * torch.get_num_threads(), x.numel() // _MANY_INPUTS))
    in_team(code_rows, Coding(*places, rows, inputs, together, zero), parts, (x, codes, scales))
    return codes, scales
