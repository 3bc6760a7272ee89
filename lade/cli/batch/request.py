"""What `lade generate --batch-size` is asked for, checked as far as that can be done without a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lade.cli.batch.output import AnswerFile
from lade.cli.prompts import Prompt, check_sources, numbered_prompts
from lade.errors import ConfigError, InputError

MOST_ROWS = 4096


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


def batch_of(
    text: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    size: int | None,
    out: Path | None,
    *,
    resume: bool,
) -> Batch | None:
    """What the options ask for; None where that is no batch.

    Args:
        text: see `read_prompts`.
        prompt: likewise.
        prompt_file: likewise.
        size: how many to decode at a time.
        out: the file to write.
        resume: go on with what is in it.

    Raises:
        ConfigError, InputError: the options contradict each other, or a file cannot be used.
    """
    if size is None:
        _refuse_without_size(out, resume=resume)
        return None
    if not 1 <= size <= MOST_ROWS:
        raise ConfigError("batch-size", size, f"give a whole number >= 1 and <= {MOST_ROWS}")
    check_sources(text, prompt, prompt_file)
    if prompt_file is None or prompt_file.suffix != ".jsonl":
        raise ConfigError("batch-size", size, "it is for many prompts: give --prompt-file FILE.jsonl, one a line")
    if resume and out is None:
        raise InputError("--resume goes on with a file: give the one to go on with as --out FILE")
    prompts = numbered_prompts(prompt_file)
    return Batch(prompt_file, prompts, size, None if out is None else AnswerFile(out, prompts, resume=resume))


def _refuse_without_size(out: Path | None, *, resume: bool) -> None:
    remedy = "is for the prompts of a file: add --batch-size, or leave it out"
    if out is not None:
        raise InputError(f"--out {remedy}")
    if resume:
        raise InputError(f"--resume {remedy}")
