"""Weights in panels, and GEMM with them: by AMX tiles or by dot-product instructions, whichever the processor has."""

from __future__ import annotations

import torch

from lade.backends.cpu.kernels import tile_products
from lade.backends.cpu.kernels.dot_products import RowBlocks, block_rows, multiply_few, multiply_many
from lade.backends.cpu.kernels.dots import COLUMNS, DOT_BLOCK, DOT_PANEL, FEW, TOGETHER, has_dots, rows_together
from lade.backends.cpu.kernels.instructions import dtype_code, is_plain, refuse
from lade.backends.cpu.kernels.panel_products import PanelProduct
from lade.backends.cpu.kernels.tile_products import TileProduct, partial_sums
from lade.backends.cpu.kernels.tiles import BLOCK_INPUTS, PANEL, ROWS, has_tiles
from lade.backends.cpu.packing.weight import HugePages
from lade.backends.cpu.worker_threads import run_on_team

_LINE, _WORD = 64, 4  # bytes per row of a tile, and per output in it
_MANY = 2**16  # least weights per part
_CHUNK = 64  # blocks of inputs that pass through all panels together
_NEAR_ROWS = 2**20  # bytes of the rows' inputs in a chunk that fit into the L2 cache alongside weights


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
    rows, most = x.numel() // x.shape[-1], _NEAR_ROWS // (2 * BLOCK_INPUTS * min(panels.shape[1], _CHUNK))
    if rows > most:
        parts = x.view(rows, -1).split(most), out.view(rows, -1).split(most)
        for some, found in zip(*parts, strict=True):
            _multiply_by_tiles(some, panels, bias, found)
    elif rows:
        _multiply_by_tiles(x, panels, bias, out)
    return out


def _multiply_by_tiles(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
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
    kernel = tile_products.multiply_few if rows <= ROWS else tile_products.multiply_many
    run_on_team(kernel, work, min(most, torch.get_num_threads()), holds=(x, rest, panels, bias, out, partial))


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _rest(x: torch.Tensor) -> torch.Tensor:
    """Return the inputs after the last whole block, padded with zeros, since kernels must not read past a row."""
    left = x.shape[1] % BLOCK_INPUTS
    return torch.nn.functional.pad(x[:, -left:], (0, BLOCK_INPUTS - left))


_NEAR, _GROUP = 2**19, 2**18  # bytes of rows and of weights that stay in a core's cache
_MANY_WEIGHTS, _MANY_INPUTS = 2**16, 2**15  # least bytes of weights, and of inputs, per thread
_SHARES = 4  # parts per thread, so that a delayed thread does not hold up the others


def panel_product(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Multiply rows `[..., in]` by weights in panels; an output does not depend on the other rows.

    Args:
        x: `[..., in]` bfloat16, on the CPU.
        panels: bfloat16 weights from `in_panels`.
        bias: `[out]` bfloat16; None for none.
        outputs: number of outputs, without padding.

    Returns:
        `[..., out]` bfloat16.

    Raises:
        ValueError: an argument has another dtype, device or shape.
    """
    count, blocks, tiles, columns, inputs = panels.shape
    fits = is_plain(x) and x.dtype == panels.dtype == torch.bfloat16 and x.dim() and -(-x.shape[-1] // inputs) == blocks
    own = bias is None or (is_plain(bias) and bias.dtype == x.dtype and bias.shape == (outputs,))
    if not (fits and own and outputs <= count * tiles * columns):
        takes = f"bfloat16 on the CPU, [..., in] and [out], up to {count * tiles * columns} outputs"
        refuse("the panel product", takes, x=x, panels=panels, bias=bias)
    product = dot_product if panels.shape[2] == 1 else tile_product
    return product(x, panels, bias, outputs)


def panel_for(dtype: torch.dtype) -> int:
    """Return the outputs per panel for weights of a dtype; 0 if this processor has no panel kernel for it."""
    if dtype not in (torch.bfloat16, torch.int8):
        return 0
    return PANEL if has_tiles() else DOT_PANEL if has_dots(dtype) else 0


def groups(rows: int, panels: int, blocks: int) -> tuple[int, int]:
    """Return the rows and panels per part of the work."""
    size = blocks * DOT_BLOCK * DOT_PANEL
    if rows <= FEW:
        return rows, max(-(-panels // (_SHARES * torch.get_num_threads())), -(-_MANY_WEIGHTS // size))
    return max(TOGETHER, _NEAR // (blocks * DOT_BLOCK) // TOGETHER * TOGETHER), max(
        COLUMNS, _GROUP // size // COLUMNS * COLUMNS
    )


def dot_product(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, outputs: int) -> torch.Tensor:
    """Multiply rows `[..., in]` by weights in panels of 16 outputs; an output does not depend on the other rows.

    Args:
        x: `[..., in]` bfloat16.
        panels: bfloat16 weights from `in_panels`, with 16 outputs per panel.
        bias: `[out]` bfloat16; None for none.
        outputs: number of outputs, without padding.

    Returns:
        `[..., out]` bfloat16.
    """
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype)
    if x.numel():
        _multiply_by_dots(x, panels, bias, out)
    return out


def _multiply_by_dots(x: torch.Tensor, panels: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Compute `dot_product` into `out`."""
    rows = x.numel() // x.shape[-1]
    laid_out = _in_blocks(x, rows)
    count, blocks, *_ = panels.shape
    row_group, panel_group = groups(rows, count, blocks)
    fields = PanelProduct(
        *(laid_out.data_ptr(), 0, panels.data_ptr(), 0),
        *((0, 0) if bias is None else (bias.data_ptr(), dtype_code(bias.dtype))),
        *(out.data_ptr(), dtype_code(out.dtype), rows, blocks, out.shape[-1], row_group, panel_group),
        *(rows_together(rows), 0),
    )
    parts = -(-rows // row_group) * -(-count // panel_group)
    run_on_team(multiply_few if rows <= FEW else multiply_many, fields, parts, (laid_out, panels, bias, out))


def _in_blocks(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Lay rows out as in `RowBlocks`; a single row whose last block is full already has this layout."""
    inputs = x.shape[-1]
    if rows == 1 and 2 * inputs % DOT_BLOCK == 0:
        return x
    together = rows_together(rows)
    to = x.new_empty(-(-rows // together) * together * -(-2 * inputs // DOT_BLOCK) * (DOT_BLOCK // 2))
    parts = max(1, min(rows, _SHARES * torch.get_num_threads(), 2 * x.numel() // _MANY_INPUTS))
    run_on_team(block_rows, RowBlocks(x.data_ptr(), to.data_ptr(), rows, inputs, together), parts, (x, to))
    return to
