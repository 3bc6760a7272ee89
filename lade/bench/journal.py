"""The journal of a run: one JSON line for each prompt that all methods have answered, so that nothing done is lost.

The first line says what must agree when the run is gone on with. A process that is killed while it writes leaves a
torn last line, which is dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lade.bench.results import SCHEMA
from lade.errors import InputError
from lade.lines import require_same, whole_lines

NAME = "journal.jsonl"


@dataclass
class Journal:
    """A file that grows by lines.

    Attributes:
        path: of the file.
        header: its first line, which is written with the second: a run that ends before it has done anything leaves
            nothing behind.
        entries: the other lines.
    """

    path: Path
    header: dict[str, Any]
    entries: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def begin(cls, path: Path, terms: Mapping[str, Any], **about: Any) -> Journal:
        """A new one, to take the place of any that is there.

        Args:
            path: of the file.
            terms: what must agree when the run is gone on with; anything JSON can hold.
            about: what else its first line is to say.
        """
        return cls(path, {"schema": SCHEMA, **about, "terms": _plain(terms)})

    @classmethod
    def go_on(cls, path: Path, terms: Mapping[str, Any]) -> Journal:
        """The one that is there; a torn last line is cut off.

        Raises:
            InputError: it cannot be read, is damaged, or is of a run on other terms; the first difference is named.
        """
        try:
            raw = path.read_bytes()
        except OSError as problem:
            raise InputError(
                f"journal {str(path)!r} cannot be read ({problem}): begin anew without --resume"
            ) from problem
        lines, whole = whole_lines(raw, path)
        if not lines or lines[0].get("schema") != SCHEMA:
            raise InputError(f"{str(path)!r} is no journal of schema {SCHEMA}: give another --out and begin anew")
        journal = cls(path, lines[0], lines[1:])
        require_same(journal.header.get("terms"), _plain(terms), repr(str(path)))
        if whole < len(raw):
            os.truncate(path, whole)
        return journal

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append a line; it is handed to the operating system at once, so that killing the process does not lose it."""
        plain = _plain(entry)
        if self.entries:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(plain))
        else:  # both lines or none
            partial = self.path.with_name(self.path.name + ".partial")
            partial.write_text(_line(self.header) + _line(plain), encoding="utf-8")
            partial.replace(self.path)
        self.entries.append(plain)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """As it comes back from the file: with lists for tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, separators=(",", ":")) + "\n"
