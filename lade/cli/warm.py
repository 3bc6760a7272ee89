"""`lade warm`: fill a draft memory from a model's answers to prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from lade.cli.options import decoding as options
from lade.cli.options.grouping import check_out
from lade.cli.prompts import Prompt, read_file
from lade.cli.terminal import EXIT_INTERRUPTED, Progress, Terminal, terminal
from lade.errors import ConfigError, InputError, UnsupportedModelError

if TYPE_CHECKING:
    from lade.cli.encoder import Encoder
    from lade.cli.loading.load import LoadedModel
    from lade.memory import Memory
    from lade.stats import Stats

EXAMPLE = "Example:  [bold]lade warm --model gpt2 --prompts questions.jsonl --out questions.memory[/bold]"
EXIT_SKIPPED = 1
SAVE_EVERY_S = 60.0

_MIB = 2**20


@dataclass(frozen=True)
class WarmOptions:
    """Options of `lade warm`.

    Attributes:
        prompts: prompt files.
        out: file of the memory.
        max_new_tokens: token limit of each answer.
        max_mib: size limit of the memory in MiB; None for the saved one, or the default.
        limit: largest number of prompts.
        fresh: start with an empty memory even if the file exists.
    """

    prompts: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="Text file with one prompt, or .jsonl file with one per line. Repeatable."),
    ]
    out: Annotated[Path, typer.Option(metavar="FILE", help="File of the memory, which is continued if it exists.")]
    max_new_tokens: options.MaxNewTokens = 200
    max_mib: Annotated[
        int | None, typer.Option(metavar="M", help="Size limit of the memory in MiB. Default: as saved, or 128.")
    ] = None
    limit: Annotated[int | None, typer.Option(metavar="P", help="Only the first P prompts.")] = None
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over, even if --out exists.")] = False

    def check(self) -> None:
        """Raise `ConfigError` for a value out of range, or a path that cannot be written."""
        options.check_max_new_tokens(self.max_new_tokens)
        for name, value in (("max-mib", self.max_mib), ("limit", self.limit)):
            if value is not None and value < 1:
                raise ConfigError(name, value, "give a whole number >= 1")
        check_out(self.out)

    def read(self) -> list[tuple[str, Prompt]]:
        """Return all prompts with their names for messages: the file, and a number if it has several."""
        found = []
        for file in self.prompts:
            own = read_file(file)
            several = len(own) > 1
            found += [(f"{file}{f' prompt {i}' if several else ''}", prompt) for i, prompt in enumerate(own, start=1)]
        return found[: self.limit]

    @property
    def continues(self) -> bool:
        """True if an existing memory is continued."""
        return self.out.exists() and not self.fresh

    def memory(self, loaded: LoadedModel) -> Memory:
        """Return the memory to start with."""
        from lade.decoding.drafting.memory import DEFAULT_BYTES
        from lade.memory import Memory

        max_bytes = None if self.max_mib is None else self.max_mib * _MIB
        if self.continues:
            return Memory.load(self.out, loaded.tokenizer, max_bytes=max_bytes)
        return Memory(DEFAULT_BYTES if max_bytes is None else max_bytes)


@dataclass
class WarmResult:
    """Result of filling a memory.

    Attributes:
        runs: statistics of each answer.
        skipped: names of unusable prompts, with the reasons.
        interrupted: Ctrl-C ended the run.
    """

    runs: list[Stats] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    interrupted: bool = False

    @property
    def new_tokens(self) -> int:
        """Number of tokens of all answers."""
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
    job: WarmOptions,
    *,
    template: options.Template,
    loading: options.Loading,
    pack: options.Pack = None,
    invariant: options.Invariant = False,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Let a model answer prompts, and save their logits as a draft memory: similar texts then decode faster.

    The memory is for --memory of other commands and for lade.Memory.load. It is saved every minute, and after Ctrl-C.
    """
    with terminal(output) as term:
        job.check()
        loading.check_layout(pack, invariant=invariant)
        template.check()
        prompts = job.read()
        from lade.cli.encoder import Encoder
        from lade.cli.loading.load import load

        loaded = load(loading, term=term, pack=pack, invariant=invariant)
        _run(Encoder(loaded, template), loaded, job, prompts, term, json=json)


def _run(
    encode: Encoder,
    loaded: LoadedModel,
    job: WarmOptions,
    prompts: list[tuple[str, Prompt]],
    term: Terminal,
    json: bool,
) -> None:
    from lade.cli.run import check_served
    from lade.config import LookaheadConfig
    from lade.model.supports import supports

    support = supports(loaded.model)
    if not support:
        raise UnsupportedModelError(str(support), "lade generate decodes it plainly, without a memory")
    memory, continues = job.memory(loaded), job.continues
    check_served(loaded, LookaheadConfig(memory=memory))
    if continues:
        term.say(f"continuing with the {len(memory)} contexts of {str(job.out)!r}; --fresh starts over", "dim")
    start = perf_counter()
    result = _Filling(memory, encode, loaded, job, term).run(prompts)
    if json:
        figures = _figures(result, memory, job.out, perf_counter() - start)
        term.write_json({**loaded.facts, "continued": continues, **figures})
    else:
        term.out.print(_table(result, memory, job.out))
    if result.interrupted:
        term.say(f"interrupted: {str(job.out)!r} has what was learned so far", "yellow")
        raise typer.Exit(EXIT_INTERRUPTED)
    if result.skipped:
        raise typer.Exit(EXIT_SKIPPED)


@dataclass
class _Filling:
    """Fills a memory from a model's answers, one prompt after the other.

    Attributes:
        result: result so far.
    """

    memory: Memory
    encode: Encoder
    loaded: LoadedModel
    job: WarmOptions
    term: Terminal
    result: WarmResult = field(default_factory=WarmResult)

    def run(self, prompts: list[tuple[str, Prompt]]) -> WarmResult:
        """Answer the prompts; save every minute, at the end, and after Ctrl-C."""
        from lade.cli.run import Interrupt

        result, saved_at = self.result, perf_counter()
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Interrupt() as interrupt:  # between generations, which have their own
            with Progress(*columns, console=self.term.err, transient=True, disable=not self.term.animated) as progress:
                task = progress.add_task("prompts", total=len(prompts))
                for done, (name, prompt) in enumerate(prompts, start=1):
                    self._answer(name, prompt)
                    progress.update(task, completed=done, description=f"prompts · {result.rate:.2f} tokens per step")
                    if perf_counter() - saved_at > SAVE_EVERY_S:
                        self._save()
                        saved_at = perf_counter()
                    result.interrupted |= interrupt.requested
                    if result.interrupted:
                        break
            if result.runs:  # an empty memory must not replace a good one
                self._save()
            result.interrupted |= interrupt.requested
        return result

    def _answer(self, name: str, prompt: Prompt) -> None:
        from lade.cli.run import decode
        from lade.config import LookaheadConfig

        try:
            ids = self.encode(prompt)
        except InputError as problem:
            self.term.say(f"skipped: {name}: {problem}", "yellow")
            self.result.skipped.append((name, str(problem)))
            return
        config, room = LookaheadConfig(memory=self.memory), self.loaded.room(ids, self.job.max_new_tokens, within=True)
        run = decode(self.loaded, ids, lookahead=config, max_new_tokens=room, term=self.term, on_step=lambda step: None)
        self.result.runs.append(run.stats)
        self.result.interrupted = run.interrupted

    def _save(self) -> None:
        self.memory.save(self.job.out, self.loaded.tokenizer)


def _figures(result: WarmResult, memory: Memory, out: Path, seconds: float) -> dict[str, Any]:
    """Return the fields that `--json` prints."""
    return {
        "prompts": len(result.runs),
        "skipped": [{"prompt": name, "reason": reason} for name, reason in result.skipped],
        "new_tokens": result.new_tokens,
        "steps": sum(run.steps for run in result.runs),
        "tokens_per_step": result.rate,
        "tokens_per_step_first_tenth": result.first_tenth,
        "tokens_per_step_last_tenth": result.last_tenth,
        "contexts": len(memory),
        "out": str(out),
        "file_bytes": _size(out),
        "seconds": seconds,
        "interrupted": result.interrupted,
    }


def _table(result: WarmResult, memory: Memory, out: Path) -> Table:
    first, last = result.first_tenth, result.last_tenth
    rows = {
        "prompts": f"{len(result.runs)}{f', {len(result.skipped)} skipped' if result.skipped else ''}",
        "tokens": str(result.new_tokens),
        "tokens per step": f"{first:.2f} in the first tenth of the prompts, {last:.2f} in the last",
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
    """Return the file size in bytes; 0 without a file."""
    return file.stat().st_size if file.exists() else 0
