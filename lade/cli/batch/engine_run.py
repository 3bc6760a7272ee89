"""Execution of `lade generate --batch-size`: prompts as requests of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from time import perf_counter, sleep
from typing import Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from lade import Engine, Handle, Memory
from lade.cli.batch.command import Batch
from lade.cli.batch.files import Entry
from lade.cli.encoder import Encoder
from lade.cli.processes import Crew, shared
from lade.cli.prompts import Prompt
from lade.cli.run import (
    Generation,
    GenerationPlan,
    Interrupt,
    check_served,
    finish_reason,
    generate_arguments,
    warn_of_length,
)
from lade.cli.terminal import EXIT_INTERRUPTED, Progress, Terminal, one_line
from lade.config import LookaheadConfig
from lade.errors import InputError, UnsupportedError

EXIT_FAILED = 1
AHEAD = 2
"""Times the batch size: how many prompts the engine has at a time, those that wait for a row included."""

_POLL_S = 0.01


def carry_out(batch: Batch, plan: GenerationPlan, term: Terminal, *, quiet: bool, crew: Crew | None = None) -> None:
    """Do it, and tell what came of it.

    Args:
        batch: the prompts, and where their answers go.
        plan: how to decode them.
        term: for the answers, if they go to no file, and for what is said about them.
        quiet: say nothing if all is well.
        crew: the processes that share the prompts; the first one writes the answers of all.

    Raises:
        ConfigError, InputError, UnsupportedModelError: a prompt cannot be continued, none can be so, or the file is of
            another run; all that before any work.
        typer.Exit: Ctrl-C was pressed, or a prompt failed.
    """
    run = BatchRun(batch, plan, term, crew)
    if run.answered == run.total and batch.file is not None:
        term.say(f"{str(batch.file.path)!r} is complete: {run.total} lines", "dim")
        return
    if run.answered:
        term.say(f"continuing after {run.answered} of {run.total} prompts", "dim")
    run.do()
    if crew is not None and not crew.first:
        return
    if run.answered < run.total:
        where = "are written; with --out FILE a run can be continued"
        if batch.file is not None:
            where = f"are in {str(batch.file.path)!r}; the same command with --resume continues"
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

    def __init__(self, batch: Batch, plan: GenerationPlan, term: Terminal, crew: Crew | None = None) -> None:
        self._batch, self._model, self._term, self._crew = batch, plan.loaded.model, term, crew
        self._answers = Answers(batch, plan, term)
        self._again: list[int] = []  # numbers of prompts that an earlier run has written an error for
        self._rest = list(batch.prompts)
        if batch.file is not None:
            batch.file.require(plan.terms)
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
        start, size, file = perf_counter(), self._batch.size, self._batch.file
        try:
            with (
                Interrupt() as interrupt,
                Engine(self._model, max_rows=size, max_waiting=AHEAD * size) as engine,
                self._progress() as progress,
                nullcontext() if self._crew is None else self._crew.sharing([*self._again, *self._rest]),
            ):
                self._answers.rehearse(engine)
                if self._crew is not None and not self._crew.first:
                    deque(self._entries([], engine, interrupt, progress), maxlen=0)
                    return
                if file is not None:
                    file.begin()
                    if self._again:
                        mended = self._entries(self._again, engine, interrupt, progress)
                        file.mend({entry["line"]: entry for entry in mended})
                write = self._term.write_json if file is None else file.add
                for entry in self._entries(self._rest, engine, interrupt, progress):
                    write(entry)
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

    def _entries(self, lines: list[int], engine: Engine, interrupt: Interrupt, progress: Progress) -> Iterator[Entry]:
        """The lines for some prompts, in order, each as soon as it can be written."""
        made = self._made(lines, partial(self._answers.begin, engine), lambda: interrupt.requested)
        with closing(made):
            for entry in made:
                self._answers.count(entry)
                yield entry
                self.answered += 1
                progress.update(progress.task_ids[0], completed=self.answered)

    def _made(self, lines: list[int], begin: Callable[[int], Handle], stopped: Callable[[], bool]) -> Generator[Entry]:
        """The same; in all but the first process of a crew none, but answers to whatever prompts it takes."""
        at_a_time = AHEAD * self._batch.size
        if self._crew is None:
            with closing(in_order(lines, begin, at_a_time, stopped)) as requests:
                for line, handle in requests:
                    yield self._answers.entry(line, handle)
            return

        def stopped_soon() -> bool:
            sleep(_POLL_S)
            return stopped()

        yield from shared(self._crew, lines, begin, self._answers.entry, at_a_time, stopped_soon)

    def _progress(self) -> Progress:
        """A bar, where no lines of JSON would run into it."""
        shown = self._term.animated and not (self._batch.file is None and self._term.interactive)
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("prompts · time left"), TimeRemainingColumn())
        progress = Progress(*columns, console=self._term.err, transient=True, disable=not shown)
        progress.add_task("prompts", total=self.total, completed=self.answered)
        return progress


class Answers:
    """Turns the prompts of a batch into requests, and what came of them into lines.

    Attributes:
        new_tokens: of all answers so far.
        failed: prompts that have none, but an error.

    Raises:
        ConfigError, InputError, UnsupportedModelError: a prompt cannot be continued, or none can be so.
    """

    def __init__(self, batch: Batch, plan: GenerationPlan, term: Terminal) -> None:
        self._batch, self._plan, self._term = batch, plan, term
        loaded = plan.loaded
        self._ids = {line: _encoded(plan.encode, each, batch.place(line)) for line, each in batch.prompts.items()}
        check_served(loaded, plan.lookahead, plan.choices)
        warn_of_length(loaded, max(map(len, self._ids.values())), plan.max_new_tokens, term)
        self._lookahead = _remembering(plan.config)
        self.new_tokens, self.failed, self._steps, self._accepted = 0, 0, 0, 0

    @property
    def tokens_per_step(self) -> float:
        """Over all answers so far."""
        return self._accepted / self._steps if self._steps else 0.0

    def rehearse(self, engine: Engine) -> None:
        """Have the engine refuse at once what it would refuse in the middle: the longest text needs the most of it."""
        longest = max(self._ids, key=lambda line: len(self._ids[line]))
        try:
            self.begin(engine, longest).cancel()
        except InputError as problem:
            raise InputError(f"{self._batch.place(longest)}: {problem}") from problem

    def begin(self, engine: Engine, line: int) -> Handle:
        """Hand a prompt to the engine."""
        plan, ids = self._plan, self._ids[line]
        prompt = torch.tensor([ids], device=plan.loaded.model.device)
        return engine.add(
            prompt,
            attention_mask=torch.ones_like(prompt),
            lookahead=self._lookahead,
            seed=plan.choices.seed,
            max_new_tokens=plan.loaded.room(ids, plan.max_new_tokens),
            **{**generate_arguments(plan.loaded, plan.choices), **plan.form},
        )

    def entry(self, line: int, handle: Handle) -> Entry:
        """The line of a request that is done; one that failed is said at once, and has the error in its line."""
        plan, named = self._plan, {"line": line, **self._batch.prompts[line].as_dict()}
        try:
            output: Any = handle.result()
        except Exception as problem:  # noqa: BLE001 - whatever ended this one, the others continue
            reason = f"{type(problem).__name__}: {one_line(problem)}"
            self._term.say(f"failed: {self._batch.place(line)}: {reason}", "yellow")
            return {**named, "error": reason, **plan.terms}
        ids = self._ids[line]
        tokens = output[0, len(ids) :].tolist()
        run = Generation(tokens, ids, handle.stats, plan.config, plan.choices)
        run.finish_reason = finish_reason(plan.loaded, run, plan.loaded.room(ids, plan.max_new_tokens))
        return {**named, **run.as_dict(plan.loaded), "settings": plan.settings}

    def count(self, entry: Entry) -> None:
        """Add the line of a request to the figures."""
        if "error" in entry:
            self.failed += 1
            return
        self.new_tokens += entry["new_tokens"]
        self._steps += entry["steps"]
        self._accepted += entry["new_tokens"] - 1  # but for the first one, which prefill yields


def in_order(
    lines: Iterable[int], begin: Callable[[int], Handle], at_a_time: int, stopped: Callable[[], bool]
) -> Generator[tuple[int, Handle]]:
    """Requests that are done, in the order of their prompts, with the numbers of these.

    Args:
        lines: numbers of prompts.
        begin: makes a request of one.
        at_a_time: how many may be under way.
        stopped: whether to end without those that are still under way; they are cancelled.
    """
    ahead, held = iter(lines), deque[tuple[int, Handle]]()
    try:
        while True:
            while held and held[0][1].done():
                yield held.popleft()
            if stopped():
                return
            room = at_a_time - sum(not handle.done() for _, handle in held)
            held.extend((line, begin(line)) for line in islice(ahead, room))
            if not held:
                return
            sleep(_POLL_S)
    finally:
        for _, handle in held:
            handle.cancel()


def _remembering(config: LookaheadConfig | None) -> LookaheadConfig | None:
    """With one memory for all prompts of a run, which are one user's, unless there is one."""
    if config is None or not config.adaptive or config.memory is not None:
        return config
    return replace(config, memory=Memory())


def _encoded(encode: Encoder, prompt: Prompt, place: str) -> list[int]:
    try:
        return encode(prompt)
    except InputError as problem:
        raise InputError(f"{place}: {problem}") from problem
