"""What is found out before the work begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lade.bench.results import Settings
from lade.bench.workloads.workload import Workload
from lade.errors import ConfigError, InputError

_LARGEST_SEED = 2**63 - 1
_MOST_REPEATS = 10_000
_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": (lambda value: value >= 1, "give a whole number >= 1"),
    "temperature": (lambda value: value is None or 1e-10 <= value <= 1e10, "give a number > 0, from 1e-10 to 1e10"),
    "top_k": (lambda value: value is None or value >= 0, "give a whole number >= 1, or 0 for no limit"),
    "top_p": (lambda value: value is None or 0.0 < value <= 1.0, "give a number > 0 and <= 1"),
    "seeds": (
        lambda value: len(set(value)) == len(value) > 0 and all(0 <= seed <= _LARGEST_SEED for seed in value),
        f"give different whole numbers from 0 to {_LARGEST_SEED}",
    ),
    "repeats": (lambda value: 1 <= value <= _MOST_REPEATS, f"give a whole number >= 1 and <= {_MOST_REPEATS}"),
}


def check_settings(settings: Settings) -> None:
    """Raise `ConfigError` for a value out of its range, or one that nothing would use."""
    for name, (fits, remedy) in _RANGES.items():
        value = getattr(settings, name)
        if not fits(value):
            raise ConfigError(name, value, remedy)
    if settings.temperature is None:
        for name, unused in (("top_k", None), ("top_p", None), ("seeds", [0])):
            value = getattr(settings, name)
            if value != unused:
                raise ConfigError(name, value, "only sampling uses it: give a temperature too, or leave it out")


def check_workloads(workloads: Sequence[Workload]) -> None:
    """Raise `InputError` unless there are workloads, with prompts, and names to tell all of them apart by."""
    names = [workload.record.name for workload in workloads]
    if not names:
        raise InputError("there is no workload: give at least one")
    for workload, name in zip(workloads, names, strict=True):
        if names.count(name) > 1:
            raise InputError(f"two workloads are named {name!r}: rename one of the files")
        if not workload.items:
            raise InputError(f"workload {name!r} has no prompts: give another")
        ids = [item.id for item in workload.items]
        for item in ids:
            if ids.count(item) > 1:
                raise InputError(f"workload {name!r} has several prompts named {item!r}: give each a name of its own")
