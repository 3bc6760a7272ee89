"""Measuring: methods side by side on the same prompts, and models of any size that write sensible text for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lade.bench import workloads
    from lade.bench.harness.benchmark import run
    from lade.bench.inflation.inflate import inflate
    from lade.bench.results import Results, Settings

__all__ = ["Results", "Settings", "inflate", "run", "workloads"]

_HOME_OF = {
    "Results": "lade.bench.results",
    "Settings": "lade.bench.results",
    "inflate": "lade.bench.inflation.inflate",
    "run": "lade.bench.harness.benchmark",
}
_PACKAGES = ("workloads",)

if not TYPE_CHECKING:  # else type checkers would believe in any name

    def __getattr__(name: str) -> Any:
        """Import a name on first use: what needs no torch does not wait for it."""
        if name in _PACKAGES:
            return importlib.import_module(f"lade.bench.{name}")
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
        return value
