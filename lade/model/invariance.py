"""What a model that rounds alike in every pass bears: the note that `lade.invariant` leaves on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lade.errors import UnsupportedModelError

_NOTE = "batch_invariance"
_AGAIN = "call lade.invariant(model) again"


@dataclass(frozen=True)
class Invariance:
    """How a model was made invariant, and what it was before.

    Attributes:
        threads: number of torch's threads in the trial, for which alone it holds.
        dtype: the model's in the trial, likewise.
        modules: how many modules it had in the trial.
        attention: the attention implementation of its decoder before.
        experts: the same of its experts; None of a model without any that can be set.
    """

    threads: int
    dtype: torch.dtype
    modules: int
    attention: str | None
    experts: str | None


def invariance_of(model: nn.Module) -> Invariance | None:
    """The note on a model; None if it was not made invariant."""
    note: Invariance | None = vars(model).get(_NOTE)
    return note


def note_invariance(model: nn.Module, invariance: Invariance | None) -> None:
    """Leave the note, or take it away; copies of the model bear it, too."""
    if invariance is None:
        vars(model).pop(_NOTE, None)
    else:
        vars(model)[_NOTE] = invariance


def why_tried_in_vain(model: Any, modules: Sequence[nn.Module], attention: bool) -> str:
    """What has changed since a model was made invariant, so that it may round otherwise now; "" if nothing.

    Args:
        model: invariant or not.
        modules: all of it.
        attention: whether its attention is still the invariant one.
    """
    note = invariance_of(model)
    if note is None:
        return ""
    threads, was = torch.get_num_threads(), str(note.dtype).removeprefix("torch.")
    if note.threads != threads:
        many = f"{note.threads} thread{'' if note.threads == 1 else 's'}"
        return f"it was made invariant for {many}, and torch has {threads} now: {_AGAIN}"
    if note.dtype != model.dtype:
        return f"it was made invariant in {was}, and is in {str(model.dtype).removeprefix('torch.')} now: {_AGAIN}"
    if not attention:
        return f"it was made invariant, and was given another attention implementation since: {_AGAIN}"
    if note.modules != len(modules):
        return f"it was made invariant with {note.modules} modules, and has {len(modules)} now: {_AGAIN}"
    if any(module._compiled_call_impl is not None for module in modules):
        return "it was made invariant and compiled since, and compilers choose kernels anew: leave it uncompiled"
    return ""


def refuse_invariant(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for an invariant model, whose layers were tried as they are."""
    if any(map(invariance_of, model.modules())):
        raise UnsupportedModelError(
            f"the layers of {type(model).__name__} were made invariant as they are",
            "call lade.variant(model) first, and lade.invariant(model) again afterwards",
        )
