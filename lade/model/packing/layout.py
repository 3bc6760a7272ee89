"""oneDNN's layout of a weight: the one that serves a few rows best."""

from __future__ import annotations

import torch

MOST_INPUTS = 4096
"""Up to so many inputs a weight lies in blocks of 64 outputs on processors with tiles."""


def packed_weight(weight: torch.Tensor) -> torch.Tensor:
    """A weight, `[out, in]`, in oneDNN's layout.

    On processors with tiles (AMX) oneDNN lays a bfloat16 weight out in blocks of 32 outputs, unless it is told that a
    single row will come: then in blocks of 64, with which up to 16 rows take an eighth less time, and up to
    `MOST_INPUTS` inputs many more numbers of rows round alike. Beyond, fewer do, so there the layout is oneDNN's own.
    """
    in_tiles = weight.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    rows = (1,) if in_tiles and weight.shape[1] <= MOST_INPUTS else ()
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, *rows)
    return packed
