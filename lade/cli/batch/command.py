"""`lade batch`, and the options of `lade generate --batch-size`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lade.cli.batch import files as requests
from lade.cli.batch.files import AnswerFile
from lade.cli.options import decoding as options
from lade.cli.options.grouping import in_panel
from lade.cli.prompts import Prompt, Source, numbered_prompts
from lade.cli.serve.options import ServedTemplate, check_all
from lade.cli.terminal import terminal
from lade.errors import ConfigError, InputError

MOST_ROWS = 4096

_option = in_panel("Many prompts")


@dataclass(frozen=True)
class Batch:
    """Prompts that are decoded together.

    Attributes:
        source: the file they are from.
        prompts: by the numbers of their lines in it.
        size: how many are decoded at a time.
        file: what the lines go to; None: standard output.
    """

    source: Path
    prompts: dict[int, Prompt]
    size: int
    file: AnswerFile | None

    @property
    def seed(self) -> int | None:
        """Of the lines that are there already."""
        return None if self.file is None else self.file.seed

    def place(self, line: int) -> str:
        """Where a prompt is from, for messages."""
        return f"{str(self.source)!r} line {line}"


@dataclass(frozen=True)
class BatchOptions:
    """Options for many prompts.

    Attributes:
        batch_size: how many to decode at a time; None: one after the other, no batch.
        out: the file to write.
        resume: whether to continue what is in it.
        replicas: whether the processes of torchrun share the prompts; else they share the model.
    """

    batch_size: Annotated[int | None, _option(metavar="B", help="Decode B prompts of a .jsonl file at a time.")] = None
    out: Annotated[Path | None, _option(metavar="FILE", help="File for the answers, as JSON lines.")] = None
    resume: Annotated[bool, _option("--resume", metavar="", help="Continue after the lines in --out.")] = False
    replicas: Annotated[
        bool, _option("--replicas", metavar="", help="Under torchrun: a whole model in each process, prompts shared.")
    ] = False

    def batch(self, source: Source, *, writes: bool = True) -> Batch | None:
        """The batch that the options describe; None where they describe none.

        Args:
            source: of the prompts.
            writes: whether this process writes the answers.

        Raises:
            ConfigError, InputError: the options contradict each other, or a file cannot be used.
        """
        size, file = self.batch_size, source.prompt_file
        if size is None and self.replicas:
            size = 1
        if size is None:
            remedy = "is for the prompts of a file: add --batch-size, or leave it out"
            if self.out is not None:
                raise InputError(f"--out {remedy}")
            if self.resume:
                raise InputError(f"--resume {remedy}")
            return None
        if not 1 <= size <= MOST_ROWS:
            raise ConfigError("batch-size", size, f"give a whole number >= 1 and <= {MOST_ROWS}")
        source.check()
        if file is None or file.suffix != ".jsonl":
            raise ConfigError("batch-size", size, "it is for many prompts: give --prompt-file FILE.jsonl, one a line")
        if self.resume and self.out is None:
            raise InputError("--resume continues a file: give it as --out FILE")
        prompts = numbered_prompts(file)
        written = None if self.out is None or not writes else AnswerFile(self.out, prompts, resume=self.resume)
        return Batch(file, prompts, size, written)


EXAMPLE = "Example:  [bold]lade batch -i requests.jsonl -o results.jsonl --model Qwen/Qwen3-0.6B[/bold]"
_MOST_BODY = 2**30
_limits = in_panel("Limits")


@dataclass(frozen=True)
class Files:
    """What is asked, and where answers go.

    Attributes:
        input: requests, one a line.
        out: answers, one a line.
        resume: whether to continue what is in it.
        name: what requests may call the model.
    """

    input: Annotated[
        Path, typer.Option("--input", "-i", metavar="FILE", help="Requests, as OpenAI's batch API has them.")
    ]
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File for the answers, as JSON lines.")]
    resume: Annotated[bool, typer.Option("--resume", metavar="", help="Continue after the good answers in --out.")] = (
        False
    )
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="What requests call the model; more than once for several names."),
    ] = None


@dataclass(frozen=True)
class Limits:
    """What the engine may take; see `lade.Engine`."""

    max_rows: Annotated[int, _limits(metavar="N", help="Requests decoded at a time.")] = 16
    max_tokens: Annotated[
        int | None, _limits(metavar="N", help="Slots of the KV cache: rows times the longest. Default: what fits.")
    ] = None
    answer_tokens: Annotated[int, _limits(metavar="N", help="Tokens of an answer, if a request names no limit.")] = 1024

    def check(self) -> None:
        """Raise `ConfigError` for a limit that is none."""
        for name in ("max_rows", "max_tokens", "answer_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name.replace("_", "-"), value, "give a whole number >= 1")


@options.grouped
def batch(
    *,
    files: Files,
    limits: Limits,
    template: ServedTemplate,
    speed: options.Speed,
    loading: options.Loading,
    output: options.Output,
) -> None:
    """Answer a file of requests in the format of OpenAI's batch API, many at a time, as lade serve would.

    Answers are written as they come, and found again by their custom_id. What ends a run loses none that is written.

    Exit code 1: a request failed. With --resume those are asked again, and what has an answer is not.
    """
    with terminal(output) as term:
        check_all(limits, loading=loading, speed=speed, template=template)
        asked = requests.read(files.input)
        from lade.cli.batch.server_run import ResultFile

        file = ResultFile(files.out, asked, resume=files.resume)
        if not file.rest:
            term.say(f"{str(file.path)!r} is complete: {len(asked)} answers", "dim")
            return
        own = template.text()
        from lade.cli.batch.server_run import carry_out
        from lade.cli.serve.model import load
        from lade.server.service import Service
        from lade.server.settings import MOST_CHOICES, MOST_PROMPTS, Settings

        settings = Settings(
            names=tuple(files.name or [loading.name.rstrip("/").rpartition("/")[2]]),
            max_rows=limits.max_rows,
            max_waiting=2 * limits.max_rows * MOST_CHOICES * MOST_PROMPTS,
            max_tokens=limits.max_tokens,
            answer_tokens=limits.answer_tokens,
            max_body=_MOST_BODY,
            template_arguments=template.arguments,
            page=False,
        )
        carry_out(Service(settings, partial(load, loading, speed, own, term)), file, len(asked), term)
