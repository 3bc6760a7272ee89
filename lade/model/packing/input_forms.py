"""In which form inputs of int8 layers are rounded, and their weights lie: whatever the processor multiplies exactly."""

from __future__ import annotations

from typing import Literal

import torch

from lade.model.kernels.tiles import has_tiles
from lade.model.packing.codes import quantised
from lade.model.packing.integer_trial import input_dtype
from lade.model.packing.tile_codes import coded

TILES: Literal["tiles"] = "tiles"
"""Codes in tiles, of inputs and of weights; the other forms are dtypes of inputs that oneDNN multiplies."""

Form = torch.dtype | Literal["tiles"]


def input_form(inputs: int, outputs: int) -> Form:
    """The form that a layer of this size takes here. All give the same bits.

    Raises:
        UnsupportedModelError: oneDNN's are not exact, see `input_dtype`.
    """
    return TILES if has_tiles() else input_dtype(inputs, outputs)


def rounded(x: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of inputs `[..., in]`, and what a step is worth: of `coded`, or of `quantised`."""
    return coded(x) if isinstance(form, str) else quantised(x, form)
