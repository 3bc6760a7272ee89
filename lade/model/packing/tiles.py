"""Weights in panels, and rows by them, on processors with tiles: each output is one chain of sums; see `tile_kernels`."""

from __future__ import annotations

import torch

from lade.model.tile_kernels import (
    BLOCK_INPUTS,
    PANEL,
    ROWS,
    Product,
    lay_out,
    multiply_few,
    multiply_many,
)
from lade.model.worker_threads import in_team

_MANY = 2**16  # weights that are worth a thread of their own
_SHARES = 4  # parts for each thread, which may be held up


def in_panels(weight: torch.Tensor) -> torch.Tensor:
    """A weight `[out, in]` in bfloat16 as panels `[out / 64, in / 32, 4, 16, 16, 2]`, filled up with zeros."""
    outputs, inputs = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -inputs % BLOCK_INPUTS, 0, -outputs % PANEL))
    return filled.view(-1, 4, ROWS, filled.shape[1] // BLOCK_INPUTS, ROWS, 2).permute(0, 3, 1, 4, 2, 5).contiguous()


def out_of_panels(panels: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """The weight `[out, in]` that `in_panels` was given."""
    count, blocks = panels.shape[:2]
    filled = panels.permute(0, 2, 4, 1, 3, 5).reshape(PANEL * count, BLOCK_INPUTS * blocks)
    return filled[:outputs, :inputs].contiguous()


def tile_product(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Rows `[..., in]` by a weight in panels: `[..., out]`; an output has the same bits beside whatever other rows.

    Args:
        x: bfloat16.
        panels: see `in_panels`.
        bias: `[out]`, bfloat16.
        outputs: how many there are.
    """
    x, inputs = x.contiguous(), x.shape[-1]
    rows = x.numel() // inputs
    out = x.new_empty(*x.shape[:-1], outputs)
    if not rows:
        return out
    bias = None if bias is None else bias.contiguous()
    blocks = -(-rows // (2 * ROWS)) if rows > ROWS else 0
    laid_out = x.new_empty(blocks * 2 * ROWS * BLOCK_INPUTS * panels.shape[1])
    places = (each.data_ptr() for each in (x, laid_out, panels))
    fields = Product(*places, 0 if bias is None else bias.data_ptr(), out.data_ptr(), rows, inputs, outputs)
    holds = x, laid_out, panels, bias, out
    parts = min(len(panels), _SHARES * torch.get_num_threads(), -(-panels.numel() // _MANY))
    if blocks:
        in_team(lay_out, fields, blocks, holds)
        in_team(multiply_many, fields, parts, holds)
    else:
        in_team(multiply_few, fields, parts, holds)
    return out
