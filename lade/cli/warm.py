"""`lade warm`: fill a draft memory from a model's answers to prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

import lade
from lade import InputError, Stats, UnsupportedModelError
from lade.cli.info import show_facts
from lade.cli.options import AT_LEAST_ONE, Checked, check_out, option
from lade.cli.options import decoding as options
from lade.cli.prompts import Prompt, read_file
from lade.cli.terminal import EXIT_INTERRUPTED, Progress, Terminal, terminal

if TYPE_CHECKING:
    from lade.cli.encoder import Encoder
    from lade.cli.loading import LoadedModel

EXAMPLE = "Example:  [bold]lade warm --model gpt2 --prompts questions.jsonl --out questions.memory[/bold]"
EXIT_SKIPPED = 1

_MIB = 2**20


@dataclass(frozen=True)
class WarmOptions(Checked):
    """Options of `lade warm`."""

    prompts: list[Path] = option(
        MISSING, "FILE", "Text file with one prompt, or .jsonl file with one per line. Repeatable."
    )
    out: Path = option(MISSING, "FILE", "File of the memory; if it exists, it is extended.")
    max_new_tokens: options.MaxNewTokens = 200
    max_mib: int | None = option(
        None, "M", "Size limit of the memory in MiB. Default: as saved, or 128.", takes=AT_LEAST_ONE
    )
    limit: int | None = option(None, "P", "Only the first P prompts.", takes=AT_LEAST_ONE)
    fresh: bool = option(False, "", "Start over, even if --out exists.", "--fresh")

    def check(self) -> None:
        """Raise `ConfigError` for a value out of range, or a path that cannot be written."""
        options.check_max_new_tokens(self.max_new_tokens)
        super().check()
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

    def memory(self, loaded: LoadedModel) -> lade.Memory:
        """Return the memory to start with; raises `UnsupportedModelError` for a model decoded without."""
        support = lade.supports(loaded.model)
        if not support:
            raise UnsupportedModelError(str(support), "lade generate decodes it plainly, without a memory")
        max_bytes = None if self.max_mib is None else self.max_mib * _MIB
        if self.continues:
            return lade.Memory.load(self.out, loaded.tokenizer, max_bytes=max_bytes)
        return lade.Memory() if max_bytes is None else lade.Memory(max_bytes)


@options.grouped
def warm(
    job: WarmOptions,
    *,
    template: options.Template,
    loading: options.Loading,
    pack: options.Pack = None,
    invariant: options.Invariant = None,
    json: options.Json = False,
    output: options.Output,
) -> None:
    """Fill a draft memory by answering prompts; similar texts then decode faster.

    The memory is for --memory of other commands and for lade.Memory.load. It is saved every minute, and after Ctrl-C.
    """
    with terminal(output) as term:
        job.check()
        loading.check_layout(pack, invariant=invariant)
        template.check()
        prompts = job.read()
        from lade.cli.encoder import Encoder
        from lade.cli.loading import load

        loaded = load(loading, term=term, pack=pack, invariant=invariant)
        encode, continues = Encoder(loaded, template), job.continues
        memory = job.memory(loaded)
        if continues:
            term.say(f"continuing with the {len(memory)} contexts of {str(job.out)!r}; --fresh starts over", "dim")
        start = perf_counter()
        save = partial(memory.save, job.out, loaded.tokenizer)
        result = fill_memory(memory, encode, loaded, prompts, job.max_new_tokens, save, term)
        if json:
            figures = _figures(result, memory, job.out, perf_counter() - start)
            term.write_json({**loaded.facts, "continued": continues, **figures})
        else:
            show_facts(_shown(result, memory, job.out), term)
        if result.interrupted:
            term.say(f"interrupted: {str(job.out)!r} has the contexts so far", "yellow")
            raise typer.Exit(EXIT_INTERRUPTED)
        if result.skipped:
            raise typer.Exit(EXIT_SKIPPED)


def _figures(result: WarmResult, memory: lade.Memory, out: Path, seconds: float) -> dict[str, Any]:
    """Return the fields that `--json` prints."""
    first, last, rate = result.rates()
    return {
        "prompts": len(result.runs),
        "skipped": [{"prompt": name, "reason": reason} for name, reason in result.skipped],
        "new_tokens": result.new_tokens,
        "steps": sum(run.steps for run in result.runs),
        "tokens_per_step": rate,
        "tokens_per_step_first_tenth": first,
        "tokens_per_step_last_tenth": last,
        "contexts": len(memory),
        "out": str(out),
        "file_bytes": _size(out),
        "seconds": seconds,
        "interrupted": result.interrupted,
    }


def _shown(result: WarmResult, memory: lade.Memory, out: Path) -> dict[str, str]:
    first, last, _ = result.rates()
    return {
        "prompts": f"{len(result.runs)}{f', {len(result.skipped)} skipped' if result.skipped else ''}",
        "tokens": str(result.new_tokens),
        "tokens per step": f"{first:.2f} in the first tenth of the prompts, {last:.2f} in the last",
        "contexts": str(len(memory)),
        "file": f"{out}, {decimal(_size(out))}",
    }


def _size(file: Path) -> int:
    """Return the file size in bytes; 0 without a file."""
    return file.stat().st_size if file.exists() else 0


SAVE_EVERY_S = 60.0


@dataclass
class WarmResult:
    """Result of filling a memory."""

    runs: list[Stats] = field(default_factory=list)  # of each answer
    skipped: list[tuple[str, str]] = field(default_factory=list)  # names of unusable prompts, with the reasons
    interrupted: bool = False  # Ctrl-C ended the run

    @property
    def new_tokens(self) -> int:
        """Number of tokens of all answers."""
        return sum(run.new_tokens for run in self.runs)

    def rates(self) -> tuple[float, float, float]:
        """Return the tokens per step of the first tenth of the prompts, of the last, and of all of them."""
        tenth = max(1, len(self.runs) // 10)
        return _rate(self.runs[:tenth]), _rate(self.runs[-tenth:]), _rate(self.runs)


def _rate(runs: list[Stats]) -> float:
    steps = sum(run.steps for run in runs)
    return sum(run.accepted_tokens for run in runs) / steps if steps else 0.0


def fill_memory(
    memory: lade.Memory,
    encode: Encoder,
    loaded: LoadedModel,
    prompts: list[tuple[str, Prompt]],
    max_new_tokens: int,
    save: Callable[[], None],
    term: Terminal,
) -> WarmResult:
    """Fill a memory from a model's answers, one prompt after the other, each with its name for messages.

    `save` is called every minute, at the end, and after Ctrl-C.
    """
    from lade.cli.run import Interrupt, decode

    result, saved_at = WarmResult(), perf_counter()
    config = lade.LookaheadConfig(memory=memory)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Interrupt() as interrupt:  # between generations, which have their own
        with Progress(*columns, console=term.err, transient=True, disable=not term.animated) as progress:
            task = progress.add_task("prompts", total=len(prompts))
            for done, (name, prompt) in enumerate(prompts, start=1):
                try:
                    ids = encode(prompt)
                except InputError as problem:
                    term.say(f"skipped: {name}: {problem}", "yellow")
                    result.skipped.append((name, str(problem)))
                else:
                    room = loaded.room(ids, max_new_tokens, within=True)
                    run = decode(loaded, ids, lookahead=config, max_new_tokens=room, term=term, on_step=lambda _: None)
                    result.runs.append(run.stats)
                    result.interrupted = run.interrupted
                rate = f"prompts · {_rate(result.runs):.2f} tokens per step"
                progress.update(task, completed=done, description=rate)
                term.status.tell(f"{done} of {len(prompts)} {rate}")
                if perf_counter() - saved_at > SAVE_EVERY_S:
                    save()
                    saved_at = perf_counter()
                result.interrupted |= interrupt.requested
                if result.interrupted:
                    break
        if result.runs:  # an empty memory must not replace a good one
            save()
        result.interrupted |= interrupt.requested
    return result
