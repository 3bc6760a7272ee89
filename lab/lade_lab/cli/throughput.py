"""`lade bench --batch-size` and `--arrivals`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table

from lade.cli.options import options_in
from lade.cli.terminal import Terminal
from lade.errors import ConfigError, InputError
from lade_lab.cli.job import Files, Plan, Runs, whole_numbers

if TYPE_CHECKING:
    from lade_lab.harness.throughput import Load


EXIT_MISMATCH = 1
_ROWS = 8
_option = options_in("Batches")


@dataclass(frozen=True)
class LoadOptions:
    """Options: batch sizes and arrival rates of a throughput run."""

    batch_size: str | None = _option(
        None, "B,B,...", "Instead of methods: time batches of B prompts, and the engine with B rows."
    )
    arrivals: float | None = _option(
        None, "RATE", "Latency of the engine and of hf with RATE prompts arriving per second."
    )

    @property
    def given(self) -> bool:
        """True if prompts are decoded in batches or as they arrive."""
        return self.batch_size is not None or self.arrivals is not None

    def rows(self, runs: Runs, files: Files, *, sampling: bool) -> list[int]:
        """Rows of batches, or of the engine.

        Raises:
            ConfigError, InputError: out of range, or beside options that it has no use for.
        """
        if self.arrivals is not None and not 0.0 < self.arrivals < math.inf:
            raise ConfigError("arrivals", self.arrivals, "give requests per second, > 0")
        unused = {
            "--methods": runs.methods,
            "--draft": runs.draft,
            "--drafter": runs.drafter,
            "--temperature": sampling,
            "--out": files.out,
            "--resume": files.resume,
            "--figures": files.figures,
        }
        for name, value in unused.items():
            if value:
                raise InputError(f"{name} is for prompts one at a time: leave it out, or --batch-size and --arrivals")
        return [_ROWS] if self.batch_size is None else whole_numbers("batch-size", self.batch_size, 1, "4,8")


def measure(plan: Plan, rows: list[int], arrivals: float | None, term: Terminal) -> None:
    """Time many prompts at a time, print a table for each number of rows, or JSON.

    Raises:
        typer.Exit: answers differ from transformers'.
    """
    from lade_lab.cli.models import load_models
    from lade_lab.harness.prompts import Prompts
    from lade_lab.harness.throughput import Load

    models, tokenizer = load_models(plan, term)
    prompts = Prompts(tokenizer, models.plain)
    items = [item for workload in plan.workloads for item in workload.items]
    pads = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    pad = next(each for each in pads if each is not None)
    load = Load(models, [prompts.ids(item) for item in items], plan.settings, pad)
    times = plan.settings.repeats
    term.say(f"{models.record.name}, {models.record.dtype}: {len(items)} prompts, {times} timed rounds and one before")
    found = [_measured(load, each, arrivals, term, json=plan.files.json) for each in rows]
    if plan.files.json:
        term.write_json({"model": asdict(models.record), "settings": asdict(plan.settings), "measured": found})
    key = "faults" if plan.files.allow_near_ties else "parting"
    if any(arm[key] for each in found for arm in each["arms"]):
        raise typer.Exit(EXIT_MISMATCH)


def _measured(load: Load, rows: int, arrivals: float | None, term: Terminal, *, json: bool) -> dict[str, Any]:
    term.show_status(f"{rows} rows")
    trials = load.batches(rows) if arrivals is None else load.arrivals(rows, arrivals)
    arms = [trial.as_dict(trials[0]) for trial in trials]
    if not json:
        term.out.print(_table(rows, arrivals, arms))
    return {"rows": rows, "arrivals_per_s": arrivals, "arms": arms}


def _table(rows: int, arrivals: float | None, arms: list[dict[str, Any]]) -> Table:
    title = f"{rows} rows" + ("" if arrivals is None else f", {arrivals:g} requests a second arriving")
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("arm", no_wrap=True)
    columns = {"tokens_per_s": "tok/s", "speedup": "over hf", "tokens_per_step": "S", "fed_per_step": "fed"}
    if arrivals is not None:
        columns = {"requests_per_s": "requests/s", "latency_median_s": "latency, s", "latency_p95_s": "95 % below"}
    for name in [*columns.values(), "differ"]:
        table.add_column(name, justify="right")
    for arm in arms:
        cells = ["-" if arm[key] is None else f"{arm[key]:.{0 if key == 'tokens_per_s' else 2}f}" for key in columns]
        table.add_row(arm["name"], *cells, str(arm["parting"]))
    return table
