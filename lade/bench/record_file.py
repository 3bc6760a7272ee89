"""Records as JSON files: dataclasses whose lists have one element a line, so that a new sample is a new line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from lade.errors import InputError
from lade.files import write_whole

RecordT = TypeVar("RecordT")


def save(path: str | os.PathLike[str], schema: str, record: Any, **more: Any) -> None:
    """Write a record, whole or not at all.

    Args:
        path: the file; its folder must exist.
        schema: its first value, for `load`.
        record: a dataclass of dataclasses, lists, dicts and plain values.
        more: further values of the object, which `load` is to ignore.

    Raises:
        InputError: it cannot be written.
    """
    values = {"schema": schema, **{each.name: getattr(record, each.name) for each in fields(record)}, **more}
    body = b",\n".join(msgspec.json.encode(name) + b": " + _value(value) for name, value in values.items())
    try:
        write_whole(path, b"{\n" + body + b"\n}\n")
    except OSError as problem:
        raise InputError(f"{str(path)!r} cannot be written ({problem}): give another --out") from problem


def load(
    path: str | os.PathLike[str], schema: str, kind: type[RecordT], *, ignored: frozenset[str] = frozenset()
) -> RecordT:
    """Read what `save` wrote; all types are checked.

    Args:
        path: the file.
        schema: that it must be of.
        kind: class of the record.
        ignored: names of values that are none of its fields.

    Raises:
        InputError: it cannot be read, is of another schema, or a field is missing, unknown or of another type.
    """
    try:
        found = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError) as problem:
        raise InputError(f"cannot read {str(path)!r} ({problem}): give another file") from problem
    if not isinstance(found, dict) or found.pop("schema", None) != schema:
        raise InputError(f"{str(path)!r} is not of schema {schema}: run lade bench again, or give another file")
    try:
        return _built(found, kind, ignored)
    except msgspec.ValidationError as problem:
        remedy = "run lade bench again, or give another file"
        raise InputError(f"{str(path)!r} is damaged ({problem}): {remedy}") from problem


def _built(found: Mapping[str, Any], kind: type[RecordT], ignored: frozenset[str]) -> RecordT:
    unknown = found.keys() - {each.name for each in fields(kind)} - ignored  # type: ignore[arg-type]
    if unknown:
        raise msgspec.ValidationError(f"unknown fields {sorted(unknown)}")
    return msgspec.convert(dict(found), kind)


def _value(value: Any) -> bytes:
    if not isinstance(value, list) or not value or isinstance(value[0], str | int | float):
        return msgspec.json.encode(value)
    return b"[\n" + b",\n".join(map(msgspec.json.encode, value)) + b"\n]"
