"""From a path, or the name of what is built in, to a workload."""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path

from lade.bench import results
from lade.bench.workloads import formats
from lade.bench.workloads.entries import parse, read_bytes
from lade.bench.workloads.workload import Item, Workload
from lade.errors import InputError

BUILTIN = "builtin"
"""Beginnings of standard library functions that the embedded model was not trained on."""


def load(source: str | Path, format: str | None = None, limit: int | None = None) -> Workload:
    """Read prompts.

    Args:
        source: a file: JSON lines or a JSON array, gzipped if its name ends in `.gz`. `path#category` takes the
            entries of one category. `"builtin"` is a set of beginnings of Python functions that needs no file.
        format: how its entries are read, one of `FORMATS`; None recognises it by the keys of the first one.
        limit: the largest number of prompts, the first ones; None takes all.

    Returns:
        The prompts in the file's order. One's own are named like their file, a benchmark's like its format, such as
            `gsm8k`; if the file is not called as it was published, its name follows, as in `gsm8k-train`.

    Raises:
        InputError: there is no such file, format or category, an entry is not what its format wants, or `limit` is
            below 1. All entries are checked, also those after the limit.
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit={limit} is not valid: give at least 1, or None for all prompts")
    if format is not None:
        formats.check(format)
    where, category = _split(str(source))
    if where == BUILTIN and not isinstance(source, Path):
        if format is not None:
            raise InputError(f"format={format!r} is for files: leave it away with {BUILTIN!r}")
        return _builtin(category, limit)
    path = Path(where)
    raw = read_bytes(path)
    entries = parse(raw, path)
    format = format or formats.recognised(entries)
    items = formats.read(entries, format)
    name = formats.named(format, _stem(path))
    return _workload(name, format, items, category, limit, hashlib.sha256(raw).hexdigest())


def _builtin(category: str | None, limit: int | None) -> Workload:
    path = Path(str(resources.files("lade.bench.workloads") / "builtin.jsonl"))
    return _workload(BUILTIN, BUILTIN, formats.read(parse(read_bytes(path), path), "jsonl"), category, limit, None)


def _workload(
    name: str, format: str, items: list[Item], category: str | None, limit: int | None, sha256: str | None
) -> Workload:
    if category is not None:
        items, name = formats.chosen(items, category), f"{name}#{category}"
    items = items[:limit]
    return Workload(results.Workload(name, format, len(items), sha256), items)


def _split(source: str) -> tuple[str, str | None]:
    """Path and category; a file whose own name has a # in it is found by that name."""
    where, mark, category = source.rpartition("#")
    return (where, category) if mark and not Path(source).exists() else (source, None)


def _stem(path: Path) -> str:
    """The file's name without what says that it is JSON."""
    name = path.name.removesuffix(".gz")
    return name.removesuffix(".jsonl").removesuffix(".json") or path.name
