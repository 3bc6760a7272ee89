"""What a benchmark of the command line runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lade.cli.options import decoding as options

if TYPE_CHECKING:
    from lade.bench.results import Method, Settings
    from lade.bench.workloads import Workload


@dataclass(frozen=True)
class Plan:
    """What is asked for, checked as far as that can be done without a model.

    Attributes:
        loading: the model, and how to load it.
        draft: as on the command line.
        methods, workloads, settings: what to run.
        out: folder for everything.
        resume: go on with what is in it.
        figures: whether to draw SVG and PNG files.
        pack, inflate, threads: how its weights are laid out and run.
        json: whether the summary is printed as JSON.
        allow_near_ties: whether they leave the exit code 0.
    """

    loading: options.Loading
    draft: str | None
    methods: list[Method]
    workloads: list[Workload]
    settings: Settings
    out: Path
    resume: bool
    figures: bool
    pack: bool | None
    inflate: float | None
    threads: int | None
    json: bool
    allow_near_ties: bool

    @property
    def name(self) -> str:
        """Of the model, for the record."""
        return self.loading.label
