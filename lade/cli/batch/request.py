"""Options of `lade generate` for many prompts, checked as far as that can be done without a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from lade.cli.batch.output import AnswerFile
from lade.cli.options.grouping import in_panel
from lade.cli.prompts import Prompt, Source, numbered_prompts
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
