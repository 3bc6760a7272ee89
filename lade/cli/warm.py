"""`lade warm`: fill a memory with what a model says to prompts, for later generations to begin with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lade.cli.options import decoding as options
from lade.cli.prompts import Prompt, read_prompts
from lade.cli.terminal import EXIT_INTERRUPTED, Terminal, terminal
from lade.errors import ConfigError, InputError

if TYPE_CHECKING:
    from lade.cli.encoder import Encoder
    from lade.cli.loading.load import Subject
    from lade.memory import Memory
    from lade.stats import Stats

EXAMPLE = "Example:  [bold]lade warm --model gpt2 --prompts questions.jsonl --out questions.memory[/bold]"
EXIT_SKIPPED = 1
SAVE_EVERY_S = 60.0

_MIB = 2**20


@dataclass(frozen=True)
class Job:
    """What is to be done.

    Attributes:
        prompts: with names for them.
        max_new_tokens: of each.
        out: the memory's file.
        max_bytes: of the memory; None: as it was saved, or the default.
        fresh: whether not to go on with what is in the file.
    """

    prompts: list[tuple[str, Prompt]]
    max_new_tokens: int
    out: Path
    max_bytes: int | None
    fresh: bool

    @property
    def goes_on(self) -> bool:
        """Whether there is something to go on with."""
        return self.out.exists() and not self.fresh


@dataclass
class Harvest:
    """What came of it.

    Attributes:
        runs: figures of each prompt.
        skipped: names of prompts that could not be used, with the reasons.
        interrupted: whether Ctrl-C ended it.
    """

    runs: list[Stats] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    interrupted: bool = False

    @property
    def new_tokens(self) -> int:
        """Of all prompts."""
        return sum(run.new_tokens for run in self.runs)

    @property
    def rate(self) -> float:
        """Tokens per step over all prompts."""
        return _rate(self.runs)

    @property
    def first_tenth(self) -> float:
        """Tokens per step of the first tenth of the prompts, of one at least."""
        return _rate(self.runs[: self._tenth])

    @property
    def last_tenth(self) -> float:
        """Tokens per step of the last tenth of the prompts, of one at least."""
        return _rate(self.runs[-self._tenth :])

    @property
    def _tenth(self) -> int:
        return max(1, len(self.runs) // 10)


def _rate(runs: list[Stats]) -> float:
    steps = sum(run.steps for run in runs)
    return sum(run.accepted_tokens for run in runs) / steps if steps else 0.0


@options.grouped
def warm(
    prompts: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="One prompt, or of .jsonl one a line: prompt or messages. May be given several times.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The memory; if it is there, it is gone on with.")],
    *,
    max_new_tokens: options.MaxNewTokens = 200,
    max_mib: Annotated[
        int | None,
        typer.Option(metavar="M", help="Largest size of the memory in RAM. Not given: as it was, or 128."),
    ] = None,
    limit: Annotated[int | None, typer.Option(metavar="P", help="Only the first P prompts.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin again, whatever the file has.")] = False,
    template: options.Template,
    loading: options.Loading,
    pack: options.Pack = None,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Have a model answer prompts, and keep what it would have said in a memory: texts alike are then written faster.

    For --memory of lade generate and lade chat, and for lade.Memory.load. It is saved now and then, and after Ctrl-C.
    """
    with terminal(output) as term:
        options.check_max_new_tokens(max_new_tokens)
        template.check()
        _check(out, max_mib, limit)
        max_bytes = None if max_mib is None else max_mib * _MIB
        job = Job(_read(prompts)[:limit], max_new_tokens, out, max_bytes, fresh)
        from lade.cli.encoder import Encoder
        from lade.cli.loading.load import load

        subject = load(loading, term=term, pack=pack)
        _run(Encoder(subject, template), subject, job, term, json=json)


def _run(encode: Encoder, subject: Subject, job: Job, term: Terminal, *, json: bool) -> None:
    from lade.cli.run import check_served
    from lade.config import LookaheadConfig

    memory, goes_on = _memory(subject, job), job.goes_on
    check_served(subject, LookaheadConfig(memory=memory))
    if goes_on:
        term.say(f"going on with the {len(memory)} contexts of {str(job.out)!r}; --fresh begins again", "dim")
    start = perf_counter()
    harvest = _fill(memory, encode, subject, job, term)
    if json:
        facts = {"model": subject.name, "dtype": subject.dtype, "packed": subject.packed, "continued": goes_on}
        term.write_json({**facts, **_figures(harvest, memory, job.out, perf_counter() - start)})
    else:
        term.out.print(_table(harvest, memory, job.out))
    if harvest.interrupted:
        term.say(f"interrupted: {str(job.out)!r} has what was learned until then", "yellow")
        raise typer.Exit(EXIT_INTERRUPTED)
    if harvest.skipped:
        raise typer.Exit(EXIT_SKIPPED)


def _memory(subject: Subject, job: Job) -> Memory:
    from lade.decoding.drafting.memory import DEFAULT_BYTES
    from lade.memory import Memory

    if job.goes_on:
        return Memory.load(job.out, subject.tokenizer, max_bytes=job.max_bytes)
    return Memory(DEFAULT_BYTES if job.max_bytes is None else job.max_bytes)


def _fill(memory: Memory, encode: Encoder, subject: Subject, job: Job, term: Terminal) -> Harvest:
    """Answer the prompts, and save: every minute, and at the end, Ctrl-C or not."""
    from lade.cli.interrupt import Interrupt

    harvest, saved_at = Harvest(), perf_counter()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Interrupt() as interrupt:  # for what lies between two generations; they have one of their own
        with Progress(*columns, console=term.err, transient=True, disable=not term.animated) as progress:
            task = progress.add_task("prompts", total=len(job.prompts))
            for done in _answered(memory, encode, subject, job, term, harvest):
                progress.update(task, completed=done, description=f"prompts · {harvest.rate:.2f} tokens a step")
                if perf_counter() - saved_at > SAVE_EVERY_S:
                    memory.save(job.out, subject.tokenizer)
                    saved_at = perf_counter()
                harvest.interrupted |= interrupt.requested
                if harvest.interrupted:
                    break
        if harvest.runs:  # else an empty memory might take the place of a good one
            memory.save(job.out, subject.tokenizer)
        harvest.interrupted |= interrupt.requested
    return harvest


def _answered(
    memory: Memory, encode: Encoder, subject: Subject, job: Job, term: Terminal, harvest: Harvest
) -> Iterator[int]:
    """Answer one prompt after the other; yields how many are done."""
    from lade.cli.run import decode
    from lade.config import LookaheadConfig

    config = LookaheadConfig(memory=memory)
    for number, (name, prompt) in enumerate(job.prompts, start=1):
        try:
            ids = encode(prompt)
        except InputError as problem:
            term.say(f"skipped: {name}: {problem}", "yellow")
            harvest.skipped.append((name, str(problem)))
            yield number
            continue
        room = subject.room(ids, job.max_new_tokens, within=True)
        run = decode(subject, ids, lookahead=config, max_new_tokens=room, term=term, on_step=lambda step: None)
        harvest.runs.append(run.stats)
        harvest.interrupted = run.interrupted
        yield number


def _figures(harvest: Harvest, memory: Memory, out: Path, seconds: float) -> dict[str, Any]:
    """What `--json` says of it."""
    return {
        "prompts": len(harvest.runs),
        "skipped": [{"prompt": name, "reason": reason} for name, reason in harvest.skipped],
        "new_tokens": harvest.new_tokens,
        "steps": sum(run.steps for run in harvest.runs),
        "tokens_per_step": harvest.rate,
        "tokens_per_step_first_tenth": harvest.first_tenth,
        "tokens_per_step_last_tenth": harvest.last_tenth,
        "contexts": len(memory),
        "out": str(out),
        "file_bytes": _size(out),
        "seconds": seconds,
        "interrupted": harvest.interrupted,
    }


def _table(harvest: Harvest, memory: Memory, out: Path) -> Table:
    first, last = harvest.first_tenth, harvest.last_tenth
    rows = {
        "prompts": f"{len(harvest.runs)}{f', {len(harvest.skipped)} skipped' if harvest.skipped else ''}",
        "tokens": str(harvest.new_tokens),
        "tokens a step": f"{first:.2f} in the first tenth of the prompts, {last:.2f} in the last",
        "contexts": str(len(memory)),
        "file": f"{out}, {decimal(_size(out))}",
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name, "dim"), Text(value))
    return table


def _size(file: Path) -> int:
    """Bytes; 0 where nothing was ever saved."""
    return file.stat().st_size if file.exists() else 0


def _read(files: list[Path]) -> list[tuple[str, Prompt]]:
    """All prompts with names for them: file, and number if it has several."""
    found = []
    for file in files:
        own = read_prompts(None, None, file)
        several = len(own) > 1
        found += [(f"{file}{f' prompt {i}' if several else ''}", prompt) for i, prompt in enumerate(own, start=1)]
    return found


def _check(out: Path, max_mib: int | None, limit: int | None) -> None:
    """Find out before the work begins what would end it."""
    for name, value in (("max-mib", max_mib), ("limit", limit)):
        if value is not None and value < 1:
            raise ConfigError(name, value, "give a whole number >= 1")
    folder = out.absolute().parent
    if not folder.is_dir():
        raise ConfigError("out", str(out), f"the folder {folder} does not exist: create it")
    if out.exists() and not out.is_file():
        raise ConfigError("out", str(out), "it is no regular file: give the name of a file")
    if not os.access(folder, os.W_OK):
        raise ConfigError("out", str(out), f"the folder {folder} cannot be written to: check its permissions")
