"""Options of `lade generate --batch-size`, and `--shard` of both batch commands."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from lade.cli.batch.result_file import PromptResults
from lade.cli.options.grouping import in_panel
from lade.cli.prompts import Prompt, Source, numbered_prompts
from lade.errors import ConfigError, InputError

T = TypeVar("T")

MAX_ROWS = 4096
_MAX_SHARDS = 10**6
_SHARD = re.compile(r"(\d{1,7})/(\d{1,7})")
_option = in_panel("Batches")

ShardOption = Annotated[
    str | None,
    _option("--shard", metavar="I/N", help="Take every N-th line of the file only, from the I-th on: 1/4, ..., 4/4."),
]


@dataclass(frozen=True)
class Shard:
    """One of several disjoint parts of a file, each for a process of its own.

    Attributes:
        index: number of the part, from 1.
        count: number of parts.
    """

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str | None) -> Shard:
        """Return the shard that `--shard` names; None is the whole file.

        Raises:
            ConfigError: the text is not I/N with 1 <= I <= N.
        """
        if text is None:
            return cls()
        match = _SHARD.fullmatch(text)
        shard = cls(*map(int, match.groups())) if match else cls(0, 0)
        if not 1 <= shard.index <= shard.count <= _MAX_SHARDS:
            raise ConfigError("shard", text[:40], "give I/N with 1 <= I <= N, such as 2/4")
        return shard

    def select(self, items: Sequence[T]) -> list[T]:
        """Return the items of this shard; lines appended to the file later do not move earlier ones."""
        return list(items[self.index - 1 :: self.count])


@dataclass(frozen=True)
class Batch:
    """Prompts of a file that are decoded together.

    Attributes:
        source: the prompt file.
        prompts: prompts of this shard by their line numbers, from 1.
        size: number of prompts decoded at a time.
        file: result file; None for standard output.
    """

    source: Path
    prompts: dict[int, Prompt]
    size: int
    file: PromptResults | None

    @property
    def seed(self) -> int | None:
        """Seed of the run that is continued, if any."""
        return None if self.file is None else self.file.seed

    def place(self, line: int) -> str:
        """Return the location of a prompt for messages."""
        return f"{str(self.source)!r} line {line}"


@dataclass(frozen=True)
class BatchOptions:
    """Options for prompt files.

    Attributes:
        batch_size: number of prompts decoded at a time; None decodes one after the other, without an engine.
        out: result file.
        resume: continue the result file.
        shard: part of the prompt file to decode.
    """

    batch_size: Annotated[
        int | None, _option(metavar="B", help="Decode B prompts of a .jsonl file at a time; results are JSON lines.")
    ] = None
    out: Annotated[Path | None, _option(metavar="FILE", help="Write the results to this file.")] = None
    resume: Annotated[bool, _option("--resume", help="Continue the run that wrote --out.")] = False
    shard: ShardOption = None

    def batch(self, source: Source) -> Batch | None:
        """Return the batch that the options describe; None without `--batch-size`.

        Raises:
            ConfigError, InputError: the options contradict each other, or a file cannot be used.
        """
        size, file = self.batch_size, source.prompts
        if size is None:
            given = {"--out": self.out is not None, "--resume": self.resume, "--shard": self.shard is not None}
            for name in (name for name, value in given.items() if value):
                raise InputError(f"{name} needs --batch-size")
            return None
        if not 1 <= size <= MAX_ROWS:
            raise ConfigError("batch-size", size, f"give a whole number from 1 to {MAX_ROWS}")
        source.check()
        if file is None or file.suffix != ".jsonl":
            raise ConfigError("batch-size", size, "needs --prompts FILE.jsonl, with a prompt on each line")
        if self.resume and self.out is None:
            raise InputError("--resume needs --out FILE")
        shard = Shard.parse(self.shard)
        prompts = dict(shard.select(list(numbered_prompts(file).items())))
        results = None if self.out is None else PromptResults(self.out, prompts, resume=self.resume)
        return Batch(file, prompts, size, results)
