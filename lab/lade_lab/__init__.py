"""Measuring: methods side by side on the same prompts, and models of any size that write sensible text for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lade_lab import workloads
    from lade_lab.harness.benchmark import run
    from lade_lab.inflation import inflate
    from lade_lab.results import Results, Settings

__all__ = ["Results", "Settings", "inflate", "run", "workloads"]

_HOME_OF = {
    "Results": "lade_lab.results",
    "Settings": "lade_lab.results",
    "inflate": "lade_lab.inflation",
    "run": "lade_lab.harness.benchmark",
}
_PACKAGES = ("workloads",)

if not TYPE_CHECKING:  # else type checkers would believe in any name

    def __getattr__(name: str) -> Any:
        """Import a name on first use: what needs no torch does not wait for it."""
        if name in _PACKAGES:
            return importlib.import_module(f"lade_lab.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
        return value
