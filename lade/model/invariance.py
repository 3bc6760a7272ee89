"""What a model that rounds alike in every pass bears: the note that `lade.invariant` leaves on it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from lade.errors import UnsupportedModelError

_NOTE = "batch_invariance"


@dataclass(frozen=True)
class Invariance:
    """How a model was made invariant, and what it was before.

    Attributes:
        threads: number of torch's threads in the trial, for which alone it holds.
        attention: the attention implementation of its decoder before.
        experts: the same of its experts; None of a model without any that can be set.
    """

    threads: int
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


def refuse_invariant(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for an invariant model, whose layers were tried as they are."""
    if any(map(invariance_of, model.modules())):
        raise UnsupportedModelError(
            f"the layers of {type(model).__name__} were made invariant as they are",
            "call lade.variant(model) first, and lade.invariant(model) again afterwards",
        )
