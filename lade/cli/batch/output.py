"""The file that `lade generate --batch-size` writes, which is its own journal: its lines say what they were made from.

Lines come in the order of the prompts, so whatever ends a run, the file has the answers to the first prompts, and a run
that continues it begins after them. A process that is killed while it writes leaves a torn last line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lade.cli.prompts import Prompt
from lade.errors import ConfigError, InputError
from lade.files import require_same, whole_lines, write_whole

Entry = dict[str, Any]
REMEDY = "give another --out"


class AnswerFile:
    """A file that grows by lines, one for each prompt.

    Args:
        path: of the file.
        prompts: by the numbers of their lines in the prompt file.
        resume: whether to continue what is there.

    Attributes:
        kept: the lines that are there, of the first prompts.

    Raises:
        ConfigError: nothing can be written there.
        InputError: there are lines, and they are not to be continued, or are not of these prompts.
    """

    def __init__(self, path: Path, prompts: Mapping[int, Prompt], *, resume: bool) -> None:
        check_place(path)
        self.path, self.kept = path, list[Entry]()
        raw = path.read_bytes() if path.exists() else b""
        if raw and not resume:
            raise InputError(f"{str(path)!r} has lines already: continue with --resume, or {REMEDY}")
        self.kept, self._whole = whole_lines(raw, path)
        if len(self.kept) > len(prompts):
            raise InputError(f"{str(path)!r} has {len(self.kept)} lines for {len(prompts)} prompts: {REMEDY}")
        wanted = [{"line": line, **prompt.as_dict()} for line, prompt in prompts.items()]
        for number, (entry, here) in enumerate(zip(self.kept, wanted, strict=False), start=1):
            require_same({name: entry.get(name) for name in here}, here, self._place(number))
        self._check_torn(raw[self._whole :], next(islice(wanted, len(self.kept), None), {}))

    @property
    def seed(self) -> int | None:
        """What the lines were drawn with, if they were."""
        seed = self.kept[0].get("seed") if self.kept else None
        return seed if isinstance(seed, int) else None

    @property
    def failed(self) -> list[int]:
        """Numbers of the prompts that have an error for an answer."""
        return [entry["line"] for entry in self.kept if "error" in entry]

    def require(self, terms: Mapping[str, Any]) -> None:
        """Raise `InputError` if a line that is there was made on other terms; the first difference is named."""
        for number, entry in enumerate(self.kept, start=1):
            require_same({name: entry.get(name) for name in terms}, dict(terms), self._place(number))

    def begin(self) -> None:
        """Make it ready for more lines; a torn last one is cut off."""
        self.path.touch()
        os.truncate(self.path, self._whole)

    def add(self, entry: Entry) -> None:
        """Append a line; the operating system has it at once, so that killing the process does not lose it."""
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(entry))
        except OSError as problem:
            raise InputError(f"{str(self.path)!r} cannot be written ({problem}): mend that, then --resume") from problem

    def mend(self, entries: Mapping[int, Entry]) -> None:
        """Put answers, by the numbers of their prompts, in the place of errors; the file is replaced as a whole."""
        self.kept = [entries.get(entry["line"], entry) for entry in self.kept]
        write_whole(self.path, "".join(map(_line, self.kept)))

    def _place(self, number: int) -> str:
        return f"line {number} of {str(self.path)!r}"

    def _check_torn(self, torn: bytes, here: Mapping[str, Any]) -> None:
        """What has no end must be the beginning of the next line, or it is not ours to cut off."""
        beginning = json.dumps(here)[:-1].encode()
        if torn[: len(beginning)] != beginning[: len(torn)]:
            raise InputError(
                f"{str(self.path)!r} ends with something else than a line for one of the prompts: {REMEDY}"
            )


def check_place(path: Path) -> None:
    """Raise `ConfigError` where no file can be written."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError("out", str(path), f"the folder {folder} does not exist: create it")
    if path.exists() and not path.is_file():
        raise ConfigError("out", str(path), "it is no regular file: give the name of a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError("out", str(path), "it cannot be written to: check its permissions")


def _line(entry: Entry) -> str:
    return json.dumps(entry) + "\n"
