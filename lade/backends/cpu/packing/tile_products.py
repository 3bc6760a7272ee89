"""Weights in panels, and bfloat16 GEMM with them by AMX tiles."""

from __future__ import annotations

import torch

from lade.backends.cpu.kernels.tile_products import TileProduct, multiply_few, multiply_many, partial_sums
from lade.backends.cpu.kernels.tiles import BLOCK_INPUTS, PANEL, ROWS
from lade.backends.cpu.packing.weight import HugePages
from lade.backends.cpu.worker_threads import run_on_team

_LINE, _WORD = 64, 4  # bytes per row of a tile, and per output in it
_MANY = 2**16  # least weights per part
_CHUNK = 64  # blocks of inputs that pass through all panels together
_NEAR = 2**20  # bytes of the rows' inputs in a chunk that fit into the L2 cache alongside weights


def in_panels(weight: torch.Tensor, pages: HugePages | None = None, panel: int = PANEL) -> torch.Tensor:
    """Return a weight `[out, in]` in panels, padded with zeros.

    A panel's block of inputs (32 in bfloat16, 64 in int8) is one or more tiles of 16 outputs; a row of a tile holds the
    same two or four inputs of each output in turn.

    Args:
        weight: `[out, in]` bfloat16 or int8, left unchanged.
        pages: memory pool to allocate from; None for ordinary memory.
        panel: outputs per panel, a multiple of 16: 64 for `kernels.tiles`, 16 for `kernels.dots`.

    Returns:
        `[out / panel, in / block, panel / 16, 16, block]`, in the weight's dtype.
    """
    outputs, inputs = weight.shape
    block = _LINE // weight.element_size()
    filled = torch.nn.functional.pad(weight, (0, -inputs % block, 0, -outputs % panel)).contiguous()
    words = filled.view(torch.int32).view(-1, panel // ROWS, ROWS, filled.shape[1] // block, _LINE // _WORD)
    words = words.permute(0, 3, 1, 4, 2)
    room = pages.take(filled.nbytes) if pages is not None else torch.empty(filled.nbytes, dtype=torch.int8)
    return room.view(torch.int32).view(words.shape).copy_(words).view(weight.dtype)


def out_of_panels(panels: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    """Invert `in_panels`: return the weight `[out, in]`."""
    words = panels.view(torch.int32).permute(0, 2, 4, 1, 3)
    filled = words.reshape(panels.shape[2] * ROWS * len(panels), -1).contiguous().view(panels.dtype)
    return filled[:outputs, :inputs].contiguous()


def tile_product(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Multiply rows `[..., in]` by weights in panels of 64 outputs; an output does not depend on the other rows.

    Args:
        x: `[..., in]` bfloat16.
        panels: bfloat16 weights from `in_panels`, with 64 outputs per panel.
        bias: `[out]` bfloat16; None for none.
        outputs: number of outputs, without padding.

    Returns:
        `[..., out]` bfloat16.
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
    """Compute `tile_product` into `out`, for few enough rows to stay in the cache."""
    inputs, outputs, blocks = x.shape[-1], out.shape[-1], panels.shape[1]
    rows, chunk = x.numel() // inputs, min(blocks, _CHUNK)
    rest = _rest(x.view(rows, inputs)) if inputs % BLOCK_INPUTS else None
    partial = None if rows <= ROWS or chunk == blocks else torch.empty(partial_sums(rows, outputs))
    work = TileProduct(
        *(_address(x), _address(rest), _address(panels), _address(bias), _address(out), _address(partial)),
        *(rows, inputs, outputs, chunk),
    )
    most = min(panels.shape[0], -(-panels.numel() // _MANY))
    kernel = multiply_few if rows <= ROWS else multiply_many
    run_on_team(kernel, work, min(most, torch.get_num_threads()), holds=(x, rest, panels, bias, out, partial))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rest(x: torch.Tensor) -> torch.Tensor:
    """Return the inputs after the last whole block, padded with zeros, since kernels must not read past a row."""
    left = x.shape[1] % BLOCK_INPUTS
    return torch.nn.functional.pad(x[:, -left:], (0, BLOCK_INPUTS - left))
