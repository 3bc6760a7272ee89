"""In which form inputs of int8 layers are rounded, and their weights lie: whatever the processor multiplies exactly."""

from __future__ import annotations

from typing import Literal

import torch

from lade.model.kernels.dots import DOT_PANEL
from lade.model.kernels.tiles import PANEL
from lade.model.packing.codes import quantised
from lade.model.packing.integer_trial import input_dtype
from lade.model.packing.panel_codes import coded
from lade.model.packing.products import panel_for

TILES: Literal["tiles"] = "tiles"
DOTS: Literal["dots"] = "dots"
"""Codes for products of our own; the other forms are dtypes of inputs that oneDNN multiplies."""

Form = torch.dtype | Literal["tiles", "dots"]

PANELS: dict[Form, int] = {TILES: PANEL, DOTS: DOT_PANEL}
"""Outputs of the panels that weights lie in."""


def input_form(inputs: int, outputs: int) -> Form:
    """The form that a layer of this size takes here. All give the same bits.

    Raises:
        UnsupportedModelError: oneDNN's are not exact, see `input_dtype`.
    """
    panel = panel_for(torch.int8)
    own = next((form for form, outputs_each in PANELS.items() if outputs_each == panel), None)
    return own or input_dtype(inputs, outputs)


def rounded(x: torch.Tensor, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of inputs `[..., in]`, and what a step is worth: of `coded`, or of `quantised`."""
    return coded(x, PANELS[form]) if isinstance(form, str) else quantised(x, form)
