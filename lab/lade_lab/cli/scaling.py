"""`lade bench scaling`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lade.cli.options import decoding as options
from lade.cli.options import options_in
from lade.cli.terminal import EXIT_INTERRUPTED, Progress, Terminal, terminal
from lade.errors import ConfigError
from lade_lab.cli.job import check_drawing, command_line, whole_numbers

if TYPE_CHECKING:
    from lade.cli.loading import LoadedModel
    from lade_lab.scaling_law import Expectation, Scaling
    from lade_lab.scaling_run import Study
    from lade_lab.workloads import Workload


EXAMPLE = "Example:  [bold]lade bench scaling --model gpt2 --prompts HumanEval.jsonl.gz --limit 20 --out law[/bold]"
EXIT_DIFFERENT = 1

_LINE_EVERY_S = 30.0  # where there is no terminal to draw a bar on


_what, _results = options_in("What to run"), options_in("Results")


@dataclass(frozen=True)
class ScalingOptions:
    """Options: the grid and its prompts."""

    workload: str = _what("builtin", "FILE", "Prompts, as for lade bench.", "--prompts", "-w")
    windows: str = _what("1,2,3,5,7,10,15,20,30,40,60", "W,W,...", "Window sizes; each is also the number of guesses.")
    ngrams: str = _what("3,4,5,6,7", "N,N,...", "N-gram lengths.")
    format: str | None = _what(None, "NAME", "Format of the file. Default: recognised by its keys.")
    limit: int | None = _what(None, "P", "Only the first P prompts.")
    max_new_tokens: int = _what(128, "N", "Maximum number of tokens to generate.", "--max-new-tokens", "-n")
    ignore_eos: bool = _what(False, "", "Continue after the end-of-text token.", "--ignore-eos")
    prompt_ngrams: bool = _what(
        True, "", "Draft n-grams of the prompt and the text, too.", "--prompt-ngrams/--no-prompt-ngrams"
    )
    threads: options.Threads = None

    def sizes(self) -> tuple[list[int], list[int]]:
        """Windows and n-gram lengths.

        Raises:
            ConfigError: an option is out of range.
        """
        windows = whole_numbers("windows", self.windows, 1, "3,5,7")
        ngrams = whole_numbers("ngrams", self.ngrams, 2, "3,5,7")
        options.check_threads(self.threads)
        options.check_max_new_tokens(self.max_new_tokens)
        if self.max_new_tokens < 2:
            remedy = "give a whole number >= 2: the first one takes no step"
            raise ConfigError("max-new-tokens", self.max_new_tokens, remedy)
        return windows, ngrams


@dataclass(frozen=True)
class ScalingResults:
    """Options: output files."""

    out: Path = _results(Path("scaling"), "DIR", "Folder for scaling.json; created if it does not exist.")
    resume: bool = _results(False, "", "Continue an interrupted run; a complete one is reported again.", "--resume")
    figures: bool = _results(False, "", "Write the figures as SVG and PNG, too.", "--figures")
    json: options.Json = False

    def check(self) -> None:
        """Find out before a model is loaded what would end the work."""
        if self.figures:
            check_drawing()
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError("out", str(self.out), "it is a file: give a folder")
        from lade_lab.scaling_run import check_folder

        check_folder(self.out, resume=self.resume)


@options.grouped
def scaling(
    wanted: ScalingOptions, *, results: ScalingResults, loading: options.Loading, output: options.Output
) -> None:
    """Measure tokens per step by tokens fed for the paper's method at many sizes, and fit its scaling law.

    Nothing is timed, so a busy machine changes nothing.

    Each size is saved when it is done; --resume continues after Ctrl-C.

    Exit code 1: an output differs from plain decoding's. 2: bad input. 130: interrupted.
    """
    with terminal(output) as term:
        sizes = wanted.sizes()
        results.check()
        from lade_lab import workloads

        source = workloads.load(wanted.workload, wanted.format, wanted.limit)
        from lade.cli.loading import load

        if wanted.threads is not None:  # before a model is made invariant, which holds for so many
            import torch

            torch.set_num_threads(wanted.threads)
        loaded = load(loading, term=term, invariant=None)  # else texts of 16-bit weights differ at near ties
        _run(_study(loaded, loading.label(), source, sizes, wanted, results), results, term)


def _study(
    loaded: LoadedModel,
    name: str,
    source: Workload,
    sizes: tuple[list[int], list[int]],
    wanted: ScalingOptions,
    results: ScalingResults,
) -> Study:
    from lade_lab.results import Model, Settings
    from lade_lab.scaling_run import Study

    return Study(
        loaded.model,
        loaded.tokenizer,
        source,
        *sizes,
        record=Model(
            name=name,
            kind=loaded.model.config.model_type,
            parameters=loaded.model.num_parameters(),
            dtype=loaded.dtype,
        ),
        command=command_line(),
        settings=Settings(max_new_tokens=wanted.max_new_tokens, ignore_eos=wanted.ignore_eos),
        prompt_ngrams=wanted.prompt_ngrams,
        folder=results.out,
        resume=results.resume,
    )


def _run(study: Study, results: ScalingResults, term: Terminal) -> None:
    found, out = study.scaling, results.out
    term.say(
        f"{found.model.name}, {found.model.dtype}: {found.workload.prompts} prompts of {found.workload.name}, at most "
        f"{found.settings.max_new_tokens} new tokens, {len(study.todo)} sizes"
        + (f"; {study.kept} are there already" if study.kept else "")
    )
    if study.outgrowing:
        term.say(f"warning: {study.outgrowing} prompts may outgrow the model's context with their answers", "yellow")
    interrupted = False
    try:
        _watch(study, term)
    except KeyboardInterrupt:
        interrupted = True
    files = _figures(found, out) if results.figures else []
    if results.json:
        term.write_json({**summary(found), "out": str(out), "figures": files, "interrupted": interrupted})
    else:
        _print(found, term)
    for each in found.wrong:
        tie = ", a near tie" if each.near_tie else ""
        term.say(f"{each.method}: prompt {each.prompt!r} differs from plain decoding at token {each.place}{tie}", "red")
    excused = len(found.mismatches) - len(found.wrong)
    if excused:
        term.say(
            f"{excused} answers differ from plain decoding's in a near tie, as {found.model.dtype} rounds", "yellow"
        )
    if interrupted:
        term.say(f"interrupted: {len(found.points)} sizes are in {str(out)!r}; --resume continues", "yellow")
        raise typer.Exit(EXIT_INTERRUPTED)
    if found.wrong:
        raise typer.Exit(EXIT_DIFFERENT)


def _watch(study: Study, term: Terminal) -> None:
    """Show how far it is: with a bar on a terminal, with a line now and then elsewhere."""
    from lade_lab.cli.run import duration

    bar, start, reported_at = term.animated, perf_counter(), perf_counter()
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description} · time left"), TimeRemainingColumn())
    with Progress(*columns, console=term.err, transient=True, disable=not bar) as progress:
        task = progress.add_task("sizes", total=1.0)
        for share in study:
            progress.update(task, completed=share, description=f"{len(study.scaling.points)} sizes")
            now = perf_counter()
            if not bar and now - reported_at > _LINE_EVERY_S and share < 1.0:
                left = (now - start) / share * (1.0 - share)
                term.say(f"{len(study.scaling.points)} sizes, {share:.0%}, about {duration(left)} left", "dim")
                reported_at = now


def _figures(found: Scaling, out: Path) -> list[str]:
    """Draw what can be drawn; the files' names."""
    if not found.points:
        return []
    from lade_lab.scaling_law import save_figures

    return [str(file) for file in save_figures(found, out)]


def summary(found: Scaling) -> dict[str, Any]:
    """Return the output of `--json`: sums, where scaling.json has each prompt."""
    record = found.as_dict()
    points = [
        {
            "window": point.window,
            "ngram": point.ngram,
            "guesses": point.guesses,
            "fed_per_step": point.fed_per_step,
            "tokens_per_step": point.tokens_per_step,
            "steps": sum(point.steps),
        }
        for point in found.points
    ]
    kept = ("model", "settings", "workload", "prompt_ngrams", "complete", "mismatches", "fits")
    return {**{name: record[name] for name in kept}, "points": points, "different": len(found.wrong)}


def _print(found: Scaling, term: Terminal) -> None:
    if not found.points:
        return
    term.out.print(Text("Tokens per step, and tokens fed per step in brackets, for W = G", "bold"))
    term.out.print(_grid(found))
    term.out.print(Text("\nS = a + b · log2 of the tokens fed", "bold"))
    term.out.print(_lines(found))
    term.out.print(Text("\nS = (f - 1 + E) / f with E = N - sum over 0 < i < N of (1 - alpha^i)^G", "bold"))
    term.out.print(_expectations(found))


def _grid(found: Scaling) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("W", justify="right")
    known = {(point.window, point.ngram): point for point in found.points}
    for ngram in found.ngrams:
        table.add_column(f"N = {ngram}", justify="right")
    for window in sorted({point.window for point in found.points}):
        own = [known.get((window, ngram)) for ngram in found.ngrams]
        cells = ["" if point is None else f"{point.tokens_per_step:.3f} ({point.fed_per_step:.0f})" for point in own]
        table.add_row(str(window), *cells)
    return table


def _lines(found: Scaling) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("N", "a", "b", "R²"):
        table.add_column(name, justify="right")
    for ngram in found.ngrams:
        line = found.line(ngram)
        cells = ("", "", "") if line is None else (line.intercept, line.slope, line.r_squared)
        table.add_row(str(ngram), *(cell if isinstance(cell, str) else f"{cell:.3f}" for cell in cells))
    return table


def _expectations(found: Scaling) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("N", "alpha", "f", "rms error", "largest error"):
        table.add_column(name, justify="right")
    rows: list[tuple[str, Expectation | None]] = [(str(ngram), found.expectation(ngram)) for ngram in found.ngrams]
    for name, fit in [*rows, ("all", found.expectation())]:
        if fit is not None:
            f = f"{fit.f:.3f}" if math.isfinite(fit.f) else "∞"
            table.add_row(name, f"{fit.alpha:.3f}", f, f"{fit.rms:.3f}", f"{fit.worst:.3f}")
    return table
