"""Codes of an input that several layers share: q, k and v are fed one tensor, and so are gate and up."""

from __future__ import annotations

from typing import NamedTuple
from weakref import ref

import torch

from lade.model.packing.input_forms import Form, rounded


class _Rounded(NamedTuple):
    """An input, in which version it was rounded to what, and who has taken that: numbers of layers."""

    x: ref[torch.Tensor]
    version: int
    form: Form
    codes: torch.Tensor
    scale: torch.Tensor
    takers: set[int]


class SharedInputs:
    """The codes of what was rounded last, for all layers of a model that are fed the same tensor, one after the other.

    A layer takes them once, so that none is given codes of an earlier pass, whatever has been written into its input.
    Copies begin with none. Threads may disturb one another, and then round anew.
    """

    def __init__(self) -> None:
        self._last: _Rounded | None = None

    def __reduce__(self) -> tuple[type[SharedInputs], tuple[()]]:
        return SharedInputs, ()

    def rounded(self, x: torch.Tensor, form: Form, taker: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `rounded` in input_forms.py; not to be written into.

        Args:
            x: `[..., in]`.
            form: of the codes.
            taker: number of the layer.
        """
        if x.is_inference():  # it has no version
            return rounded(x, form)
        last = self._last
        same = last is not None and last.x() is x and (last.version, last.form) == (x._version, form)
        if last is not None and same and taker not in last.takers:
            last.takers.add(taker)
            return last.codes, last.scale
        codes, scale = rounded(x, form)
        self._last = _Rounded(ref(x), x._version, form, codes, scale, {taker})
        return codes, scale
