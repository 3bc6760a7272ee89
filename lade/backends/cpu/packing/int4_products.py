"""Products of int8 rows with int4 weights: exact sums of 32 inputs, scaled and added up in their order in float32.

The compiled kernel and its reference in `int4` give the same bits: a sum has at most 16 bits and a scale 8, so their
product is exact in float32, and every 32 inputs add one rounding. A row does not depend on the other rows.
"""

from __future__ import annotations

import torch

from lade.backends.cpu.kernels import address_of, dtype_code, kernel
from lade.backends.cpu.packing.code_products import checked_bias, rows_to_quantise
from lade.backends.cpu.packing.int4_codes import BLOCK
from lade.backends.cpu.packing.panels import RowGroups, parts_of_rows
from lade.backends.cpu.worker_threads import run_on_team

WIDE, NARROW = RowGroups((1, 2, 4, 6, 8, 12, 16), 16, 1), RowGroups((1, 2, 4), 4, 1)
"""Groups of rows for 32 registers of 64 bytes, and for 16 of 32 bytes."""
_NEAR, _GROUP = 2**19, 2**17  # bytes of rows and of weights that stay in a core's cache
_MANY_WEIGHTS = 2**15  # least bytes of weights per part
_SHARES = 4  # parts per thread, so that a delayed thread does not hold up the others
_STARTS = BLOCK // 8  # bytes of initial sums per block of a row


def has_int4_kernel() -> bool:
    """Return True if the compiled library is there, which has an int4 kernel for every processor."""
    return kernel("multiply_int4").available


def int4_row_groups(instructions: str = "") -> RowGroups:
    """Return the groups of rows of the int4 kernel for some instructions; empty for the best of this processor."""
    wide = instructions.startswith("avx512") if instructions else kernel("multiply_int4", "avx512").available
    return WIDE if wide else NARROW


def quantised_for_int4(x: torch.Tensor, groups: RowGroups | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise inputs like `quantised`, to signed codes in blocks followed by the initial sums of int4 products.

    Args:
        x: `[..., in]`, float32, bfloat16 or float16.
        groups: groups of rows that the product will use; None for those of this processor.

    Returns:
        Codes `[rows / together, blocks, together, 64]` int8 and behind them initial sums `[rows / together, 2 * blocks,
            together]` int32, in one int8 tensor; and the rows' scales, `[rows]` float32.

    Raises:
        ValueError: x has another dtype or device, or no inputs.
    """
    x, rows, inputs = rows_to_quantise(x)
    together = (groups or int4_row_groups()).together_for(rows)
    blocks = -(-rows // together) * together * -(-inputs // BLOCK)
    codes, scales = torch.empty(blocks * (BLOCK + _STARTS), dtype=torch.int8), torch.empty(rows)
    place = codes.data_ptr()
    fields = (  # a RowQuantisation, see cpu_rows.h
        *(x.data_ptr(), dtype_code(x.dtype), place, scales.data_ptr(), rows, inputs, together, 0),
        place + blocks * BLOCK,
    )
    run_on_team(kernel("quantise_rows"), fields, parts_of_rows(rows, x.numel()), (x, codes, scales))
    return codes, scales


def int4_product(
    codes: torch.Tensor,
    scales: torch.Tensor,
    panels: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    instructions: str = "",
) -> torch.Tensor:
    """Multiply int8 rows by int4 weights in panels.

    Args:
        codes: codes and initial sums of the rows, from `quantised_for_int4`.
        scales: `[rows]` float32, scales of the rows.
        panels: weights from `in_int4_panels`.
        bias: `[out]`, in any dtype that inputs may have; None for none.
        out: `[..., out]`, contiguous, in any dtype that inputs may have; written in place.
        instructions: instructions of the kernel, see `kernel`.

    Returns:
        The tensor `out`.

    Raises:
        ValueError: the bias has another dtype, device or shape.
    """
    bias = checked_bias(bias, out)
    rows, (count, blocks, lines, line) = scales.numel(), panels.shape
    if not rows:
        return out
    together = int4_row_groups(instructions).together_for(rows)
    row_group, panel_group = _parts(rows, together, count, blocks, blocks * lines * line)
    padded = -(-rows // together) * together
    fields = (  # a PanelProduct, see cpu_panels.h
        *(codes.data_ptr(), scales.data_ptr(), panels.data_ptr(), 0),
        *(address_of(bias), 0 if bias is None else dtype_code(bias.dtype), out.data_ptr(), dtype_code(out.dtype)),
        *(rows, blocks, out.shape[-1], row_group, panel_group, together, codes.data_ptr() + padded * blocks * BLOCK),
    )
    parts = -(-rows // row_group) * -(-count // panel_group)
    run_on_team(kernel("multiply_int4", instructions), fields, parts, (codes, scales, panels, bias, out))
    return out


def _parts(rows: int, together: int, panels: int, blocks: int, size: int) -> tuple[int, int]:
    """Return the rows and panels per part of the work, for panels of `size` bytes."""
    if rows <= 2 * together:
        return rows, max(-(-panels // (_SHARES * torch.get_num_threads())), -(-_MANY_WEIGHTS // size))
    return max(together, _NEAR // (blocks * BLOCK) // together * together), max(1, _GROUP // size)
