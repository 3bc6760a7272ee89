"""What differs between the settings of a run that is resumed and those it began with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

from lade.errors import InputError

_LONGEST, _CONTEXT = 60, 20  # characters of a value in a message; of these, how many of a common prefix


def differences(there: Any, here: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield `(name, there, here)` of values that differ, named as in `settings.max_new_tokens`; None if missing."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in {**there, **here}:
            yield from differences(there.get(key), here.get(key), f"{name}.{key}".removeprefix("."))
    elif isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        for number, pair in enumerate(zip(there, here, strict=True), start=1):
            yield from differences(*pair, f"{name} {number}")
    elif there != here:
        yield name, there, here


def require_same(there: Any, here: Any, place: str) -> None:
    """Raise `InputError` naming the first difference between a file's content and the present settings.

    Args:
        there: value read from the file.
        here: present value; anything that JSON can hold, with lists for tuples.
        place: the file, or the line in it, for the error message.
    """
    for name, old, new in differences(there, here):
        skip = _common_prefix(old, new)
        raise InputError(
            f"{name} is {_shown(new, skip)} here, but {_shown(old, skip)} in {place}: resume with the settings that "
            "the run began with, or give another --out"
        )


def _common_prefix(old: Any, new: Any) -> int:
    """Return how many leading characters two texts have in common, less some context; 0 if they are not texts."""
    if not (isinstance(old, str) and isinstance(new, str)):
        return 0
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
    return max(0, alike - _CONTEXT)


def _shown(value: Any, skip: int) -> str:
    """Return a value as JSON, shortened."""
    text = json.dumps(f"...{value[skip:]}" if skip else value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
