"""Which form of input codes oneDNN multiplies exactly on this processor: tried, with the largest codes and sums.

Unsigned inputs with their zero at 128 are what VNNI multiplies with signed weights. Beside AMX oneDNN takes the zero's
part off the sums in float32, which is not exact beyond 2^24, but there it multiplies signed inputs as fast. Both stand
for the same integers, so results have the same bits on either sort of processor.
"""

from __future__ import annotations

from functools import cache

import torch

from lade.errors import UnsupportedModelError
from lade.model.packing.codes import LARGEST, ZERO_POINT, in_form
from lade.model.packing.integer_product import multiplied, prepacked
from lade.model.packing.onednn import required

REMEDY = "pack it without weights='int8'"
_ROWS, _OUTPUTS = (1, 4, 17, 40), 256
"""Rows and outputs that are tried: oneDNN takes other kernels for up to 32 rows and 256 results."""
_NEAR = 32
"""Codes this near to the largest make sums near to the largest, odd ones among them."""


def input_dtype(inputs: int, outputs: int) -> torch.dtype:
    """The dtype of a layer's input codes, uint8 or int8: one in which its products are exact here.

    Processors with neither VNNI nor AMX add pairs in 16 bits and may cut them off. Nor are signed inputs taken without
    AMX: there they are exact, but multiplied one by one.

    Args:
        inputs: of the layer.
        outputs: of the layer; some are tried.

    Raises:
        UnsupportedModelError: there is none, or no kernel.
    """
    forms = (torch.uint8, torch.int8) if torch.cpu._is_amx_tile_supported() else (torch.uint8,)
    with required("int8 kernel", REMEDY):
        exact = next((form for form in forms if _is_exact(inputs, min(outputs, _OUTPUTS), form)), None)
    if exact is None:
        raise UnsupportedModelError("PyTorch's int8 kernel is not exact on this processor", REMEDY)
    return exact


@cache
@torch.no_grad()
def _is_exact(inputs: int, outputs: int, form: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    values, x = _large_codes(outputs, inputs, generator), _large_codes(max(_ROWS), inputs, generator)
    scale, zeros = torch.rand(outputs, generator=generator), torch.zeros(outputs, dtype=torch.int)
    packed, codes = prepacked(values), in_form((x.short() + ZERO_POINT).to(torch.uint8), form)
    found = [multiplied(codes[:rows], packed, scale, zeros) for rows in _ROWS]
    sums = (x.double() @ values.double().t()).float()  # [rows, out]; float32 rounds large sums
    kept = torch.equal(packed.to_dense().t(), values)
    return kept and all(torch.equal(part, sums[: len(part)] * scale) for part in found)


def _large_codes(rows: int, inputs: int, generator: torch.Generator) -> torch.Tensor:
    """Signed codes `[rows, inputs]`: of four rows one is random, two are near the largest, one near the least.

    The first two rows are the largest there are, in the second one the first code excepted: of the sums of such rows
    some are odd, which float32 rounds as soon as it rounds any.
    """
    least = torch.tensor([LARGEST - _NEAR, LARGEST - _NEAR, -LARGEST, -LARGEST]).repeat(rows // 4 + 1)[:rows, None]
    most = torch.tensor([LARGEST, LARGEST, LARGEST, _NEAR - LARGEST]).repeat(rows // 4 + 1)[:rows, None]
    drawn = torch.rand(rows, inputs, generator=generator) * (most - least + 1) + least
    codes = drawn.floor_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    codes[:2] = LARGEST
    codes[1:2, :1] = LARGEST - 1
    return codes
