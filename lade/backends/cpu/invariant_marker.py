"""The marker that `lade.invariant` leaves on a batch-invariant model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch
from torch import nn

from lade.errors import UnsupportedModelError
from lade.model.facts import INVARIANCE, ModelFacts
from lade.model.in_place_subclassing import Changed

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
        changed: how many of its modules were changed in place. A new one in place of such a module is not.
    """

    threads: int
    dtype: torch.dtype
    modules: int
    attention: str | None
    experts: str | None
    changed: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A process that has unpickled an invariant model has to know its attention by name, too."""
        return _revived, tuple(getattr(self, each.name) for each in fields(self))


def _revived(*values: Any) -> Invariance:
    import_module(
        "lade.backends.cpu.invariant.make_invariant"
    )  # which registers attention and experts with transformers
    return Invariance(*values)


def invariance_of(model: nn.Module) -> Invariance | None:
    """The note on a model; None if it was not made invariant."""
    note: Invariance | None = vars(model).get(INVARIANCE)
    return note


def note_invariance(model: nn.Module, invariance: Invariance | None) -> None:
    """Leave the note, or take it away; copies of the model bear it, too."""
    if invariance is None:
        vars(model).pop(INVARIANCE, None)
    else:
        vars(model)[INVARIANCE] = invariance


def why_tried_in_vain(facts: ModelFacts, attention: bool) -> str:
    """What has changed since a model was made invariant, so that it may round otherwise now; "" if nothing.

    Args:
        facts: of the model, invariant or not.
        attention: whether its attention is still the invariant one.
    """
    model = facts.model
    note = invariance_of(model)
    if note is None:
        return ""
    threads, was = torch.get_num_threads(), str(note.dtype).removeprefix("torch.")
    if note.threads != threads:
        many = f"{note.threads} thread{'' if note.threads == 1 else 's'}"
        return f"it was made invariant for {many}, and torch has {threads} now: {_AGAIN}"
    if note.dtype != model.dtype:
        return f"it was made invariant in {was}, and is in {str(model.dtype).removeprefix('torch.')} now: {_AGAIN}"
    if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") != note.dtype:
        return f"it was made invariant in {was}, and autocast has it compute in another dtype: leave torch.autocast"
    if not attention:
        return f"it was made invariant, and was given another attention implementation since: {_AGAIN}"
    if note.modules != len(facts.modules):
        return f"it was made invariant with {note.modules} modules, and has {len(facts.modules)} now: {_AGAIN}"
    changed = changed_modules(facts)
    if note.changed != changed:
        return f"it was made invariant with {note.changed} modules changed, of which {changed} are left: {_AGAIN}"
    if any(kind.__module__.startswith("torch.distributed") for kind in facts.kinds):
        return "it was made invariant and sharded since: leave it whole"
    if facts.compiled:
        return "it was made invariant and compiled since, and compilers choose kernels anew: leave it uncompiled"
    return ""


def changed_modules(facts: ModelFacts) -> int:
    """How many modules of a model are changed in place."""
    return sum(len(modules) for kind, modules in facts.kinds.items() if issubclass(kind, Changed))


def refuse_invariant(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for an invariant model, whose layers were tried as they are."""
    if any(map(invariance_of, model.modules())):
        raise UnsupportedModelError(
            f"the layers of {type(model).__name__} were made invariant as they are",
            "call lade.variant(model) first, and lade.invariant(model) again afterwards",
        )
