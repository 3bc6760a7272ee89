"""Carries `lade generate --batch-size` out: progress, lines as they come, and what Ctrl-C leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from time import perf_counter

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lade import Engine
from lade.cli.batch.answers import Answers, Recipe, in_order
from lade.cli.batch.output import Entry
from lade.cli.batch.request import Batch
from lade.cli.interrupt import Interrupt
from lade.cli.terminal import EXIT_INTERRUPTED, Terminal
from lade.errors import InputError, UnsupportedError

EXIT_FAILED = 1
AHEAD = 2
"""Times the batch size: so many prompts the engine has at a time, those that wait for a row included."""


def carry_out(batch: Batch, recipe: Recipe, term: Terminal, *, quiet: bool) -> None:
    """Do it, and tell what came of it.

    Args:
        batch: the prompts, and where their answers go.
        recipe: how to decode them.
        term: for the answers, if they go to no file, and for what is said about them.
        quiet: say nothing if all is well.

    Raises:
        ConfigError, InputError, UnsupportedModelError: a prompt cannot be continued, none can be so, or the file is of
            another run; all that before any work.
        typer.Exit: Ctrl-C was pressed, or a prompt failed.
    """
    run = BatchRun(batch, recipe, term)
    if run.answered == run.total and batch.file is not None:
        term.say(f"{str(batch.file.path)!r} is complete: {run.total} lines", "dim")
        return
    if run.answered:
        term.say(f"going on after {run.answered} of {run.total} prompts", "dim")
    run.do()
    if run.answered < run.total:
        where = "are written; with --out FILE a run can be gone on with"
        if batch.file is not None:
            where = f"are in {str(batch.file.path)!r}; the same command with --resume goes on"
        term.say(f"interrupted: {run.answered} of {run.total} prompts {where}", "yellow")
        raise typer.Exit(EXIT_INTERRUPTED)
    if not quiet:
        term.say(run.summary(), "dim")
    if run.failed:
        again = "" if batch.file is None else "; the same command with --resume tries them again"
        term.say(f"{run.failed} of {run.total} prompts failed{again}", "yellow")
        raise typer.Exit(EXIT_FAILED)


class BatchRun:
    """One batch, to be done once. Errors are those of `carry_out`.

    Attributes:
        total: number of prompts.
        answered: those that have a line, an earlier run's good ones included.
    """

    def __init__(self, batch: Batch, recipe: Recipe, term: Terminal) -> None:
        self._batch, self._model, self._term = batch, recipe.subject.model, term
        self._answers = Answers(batch, recipe, term)
        self._again: list[int] = []  # numbers of prompts that an earlier run has written an error for
        self._rest = list(batch.prompts)
        if batch.file is not None:
            batch.file.require(recipe.terms)
            self._again = batch.file.failed
            self._rest = self._rest[len(batch.file.kept) :]
        self.total = len(batch.prompts)
        self.answered = self.total - len(self._rest) - len(self._again)
        self._seconds = 0.0

    @property
    def failed(self) -> int:
        """Prompts that this run has written an error for."""
        return self._answers.failed

    def do(self) -> None:
        """Decode and write. After Ctrl-C nothing more is begun, and what is not done by then is dropped."""
        start, size = perf_counter(), self._batch.size
        try:
            with (
                Interrupt() as interrupt,
                Engine(self._model, max_rows=size, max_waiting=AHEAD * size) as engine,
                self._progress() as progress,
            ):
                self._answers.rehearse(engine)
                self._write(partial(self._entries, engine, interrupt, progress))
        except KeyboardInterrupt:  # the second one, which waits for nothing
            pass
        except UnsupportedError as problem:
            raise InputError(f"{problem.reason}: leave out --batch-size to decode one prompt at a time") from problem
        self._seconds = perf_counter() - start

    def summary(self) -> str:
        """The statistics line."""
        tokens, file = self._answers.new_tokens, self._batch.file
        where = "" if file is None else f" · {str(file.path)!r} has {self.total} lines"
        return (
            f"{tokens} tokens in {self._seconds:.1f} s · {tokens / self._seconds:.1f} tokens/s · "
            f"{self._answers.tokens_per_step:.2f} tokens a step{where}"
        )

    def _write(self, entries: Callable[[list[int]], Iterator[Entry]]) -> None:
        """Have the lines for some prompts written, those that failed before first."""
        file = self._batch.file
        if file is None:
            for entry in entries(self._rest):
                self._term.write_json(entry)
            return
        file.begin()
        if self._again:
            file.mend({entry["line"]: entry for entry in entries(self._again)})
        for entry in entries(self._rest):
            file.add(entry)

    def _entries(self, engine: Engine, interrupt: Interrupt, progress: Progress, lines: list[int]) -> Iterator[Entry]:
        """The lines for some prompts, in order, each as soon as it can be written."""
        begin, at_a_time = partial(self._answers.begin, engine), AHEAD * self._batch.size
        with closing(in_order(lines, begin, at_a_time, lambda: interrupt.requested)) as requests:
            for line, handle in requests:
                yield self._answers.entry(line, handle)
                self.answered += 1
                progress.update(progress.task_ids[0], completed=self.answered)

    def _progress(self) -> Progress:
        """A bar, where no lines of JSON would run into it."""
        shown = self._term.animated and not (self._batch.file is None and self._term.interactive)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("prompts · time left"), TimeRemainingColumn())
        progress = Progress(*columns, console=self._term.err, transient=True, disable=not shown)
        progress.add_task("prompts", total=self.total, completed=self.answered)
        return progress
