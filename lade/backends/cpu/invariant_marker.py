"""The record that `lade.invariant` leaves on a batch-invariant model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lade.errors import UnsupportedModelError
from lade.model.capture_blockers import capture_blocker
from lade.model.facts import INVARIANCE, ModelFacts
from lade.model.inputs import INVARIANT_ATTENTION
from lade.model.module_changes import Changed
from lade.model.registry import Role


class _OnGpu(Protocol):
    def invariant_refusal(self, model: Any) -> str: ...
    def make_invariant(self, model: Any) -> str: ...


ON_GPU: Role[_OnGpu] = Role("invariance on GPUs")
_AGAIN = "call lade.invariant(model) again"


@dataclass(frozen=True)
class Invariance:
    """How a model was made invariant, and the settings to restore."""

    threads: int | None  # of torch during the trial; invariance is known for this number only. None on a GPU
    dtype: torch.dtype  # of the model during the trial
    modules: int  # number of its modules during the trial
    attention: str | None  # attention implementation of its decoder before
    experts: str | None  # experts implementation of its decoder before; None without configurable experts
    changed: int = 0  # number of modules that were subclassed in place; replacing one of them is detected by this


def invariance_of(model: nn.Module) -> Invariance | None:
    """Return the record on a model; None if it was not made invariant."""
    note: Invariance | None = vars(model).get(INVARIANCE)
    return note


def set_invariance(model: nn.Module, invariance: Invariance | None) -> None:
    """Set or remove the record; it is copied along with the model."""
    if invariance is None:
        vars(model).pop(INVARIANCE, None)
    else:
        vars(model)[INVARIANCE] = invariance


def stale_reason(facts: ModelFacts, attention: str | None) -> str:
    """Return what has changed since a model was made invariant and may affect rounding; an empty string if nothing has.

    The model may not be invariant. `attention` is the name of its attention implementation now.
    """
    model = facts.model
    note = invariance_of(model)
    if note is None:
        return ""
    threads, was = torch.get_num_threads(), str(note.dtype).removeprefix("torch.")
    if note.threads not in (None, threads):
        many = f"{note.threads} thread{'' if note.threads == 1 else 's'}"
        return f"it was made invariant for {many}, but torch now uses {threads}: {_AGAIN}"
    if note.dtype != model.dtype:
        return f"it was made invariant in {was}, but is now in {str(model.dtype).removeprefix('torch.')}: {_AGAIN}"
    device = "cuda" if note.threads is None else "cpu"
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != note.dtype:
        return f"it was made invariant in {was}, but autocast computes in another dtype: leave torch.autocast"
    if attention != (note.attention if note.threads is None else INVARIANT_ATTENTION):
        return f"its attention implementation was changed after it was made invariant: {_AGAIN}"
    if note.modules != len(facts.modules):
        return f"it was made invariant with {note.modules} modules, but now has {len(facts.modules)}: {_AGAIN}"
    changed = changed_modules(facts)
    if note.changed != changed:
        return f"it was made invariant by changing {note.changed} modules, of which only {changed} are left: {_AGAIN}"
    if any(kind.__module__.startswith("torch.distributed") for kind in facts.kinds):
        return "it was sharded after it was made invariant: leave it unsharded"
    if note.threads is None and (reason := capture_blocker(facts)):
        return f"{reason}: remove what was added after it was made invariant"
    if facts.compiled:
        return "it was compiled after it was made invariant, and compilers choose other kernels: leave it uncompiled"
    return ""


def changed_modules(facts: ModelFacts) -> int:
    """Return the number of modules that were subclassed in place."""
    return sum(len(modules) for kind, modules in facts.kinds.items() if issubclass(kind, Changed))


def refuse_invariant(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for an invariant model, since changing its layers would void the trial."""
    if any(map(invariance_of, model.modules())):
        raise UnsupportedModelError(
            f"{type(model).__name__} was made invariant with its present layers",
            "call lade.variant(model) first, and lade.invariant(model) again afterwards",
        )
