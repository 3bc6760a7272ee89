"""Weights in panels for processors with tiles, and rows by them: an output is one chain of sums, see `tile_kernels`."""

from __future__ import annotations

import torch

from lade.model.packing.huge_pages import HugePages
from lade.model.tile_kernels import BLOCK_INPUTS, PANEL, ROWS, Product, multiply_few, multiply_many, partial_sums
from lade.model.worker_threads import in_team

_MANY = 2**16  # weights that are worth a part of their own
_CHUNK = 64  # blocks of inputs that go through all panels together
_NEAR = 2**20  # bytes of the rows' inputs in a chunk, for which the second cache has room beside weights


def in_panels(weight: torch.Tensor, pages: HugePages | None = None) -> torch.Tensor:
    """A weight `[out, in]` in bfloat16 as panels `[out / 64, in / 32, 4, 16, 16, 2]`, filled up with zeros.

    Args:
        weight: is left as it is.
        pages: what memory for them is taken from.
    """
    outputs, inputs = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -inputs % BLOCK_INPUTS, 0, -outputs % PANEL)).contiguous()
    pairs = filled.view(torch.int32).view(-1, 4, ROWS, filled.shape[1] // BLOCK_INPUTS, ROWS).permute(0, 3, 1, 4, 2)
    room = pages.take(filled.nbytes) if pages is not None else torch.empty(filled.nbytes, dtype=torch.int8)
    panels = room.view(torch.int32).view(pairs.shape).copy_(pairs)
    return panels.view(weight.dtype).view(*panels.shape, 2)


def out_of_panels(panels: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """The weight `[out, in]` that `in_panels` was given."""
    pairs = panels.flatten(-2).view(torch.int32).permute(0, 2, 4, 1, 3)
    filled = pairs.reshape(PANEL * len(panels), -1).view(panels.dtype)
    return filled[:outputs, :inputs].contiguous()


def tile_product(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Rows `[..., in]` by a weight in panels: `[..., out]`; an output has the same bits beside whatever other rows.

    Args:
        x: bfloat16.
        panels: see `in_panels`.
        bias: `[out]`, bfloat16.
        outputs: how many there are.
    """
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    rows, most = x.numel() // x.shape[-1], _NEAR // (2 * BLOCK_INPUTS * min(panels.shape[1], _CHUNK))
    if rows > most:
        parts = x.view(rows, -1).split(most), out.view(rows, -1).split(most)
        for some, found in zip(*parts, strict=True):
            _multiply(some, panels, bias, found)
    elif rows:
        _multiply(x, panels, bias, out)
    return out


def _multiply(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """As `tile_product`, into `out`, of so few rows that they stay near."""
    inputs, outputs, blocks = x.shape[-1], out.shape[-1], panels.shape[1]
    rows, chunk = x.numel() // inputs, min(blocks, _CHUNK)
    rest = _rest(x.view(rows, inputs)) if inputs % BLOCK_INPUTS else None
    partial = None if rows <= ROWS or chunk == blocks else torch.empty(partial_sums(rows, outputs))
    work = Product(
        *(_place(x), _place(rest), _place(panels), _place(bias), _place(out), _place(partial)),
        *(rows, inputs, outputs, chunk),
    )
    most = min(panels.shape[0], -(-panels.numel() // _MANY))
    kernel = multiply_few if rows <= ROWS else multiply_many
    in_team(kernel, work, min(most, torch.get_num_threads()), holds=(x, rest, panels, bias, out, partial))


def _place(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rest(x: torch.Tensor) -> torch.Tensor:
    """The inputs of rows behind the last whole block, filled up with zeros, since nothing behind a row may be read."""
    left = x.shape[1] % BLOCK_INPUTS
    return torch.nn.functional.pad(x[:, -left:], (0, BLOCK_INPUTS - left))
