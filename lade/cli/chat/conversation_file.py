"""Conversations as files: JSON with messages as chat templates and most servers have them.

`{"model": "org/name", "messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}, ...]}`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lade.errors import InputError

_REMEDY = "give a file that /save wrote"


def save(path: Path, messages: Sequence[dict[str, str]], model: str) -> None:
    """Write a conversation: the file holds the old one or the new one, whole.

    Args:
        path: may be that of an earlier conversation, but of nothing else.
        messages: at least one turn.
        model: its name, for the record.

    Raises:
        InputError: there is something else, or the file cannot be written.
    """
    if path.exists():
        try:
            load(path)
        except InputError as problem:
            raise InputError(f"{str(path)!r} is there and holds no conversation: give another name") from problem
    text = json.dumps({"model": model, "messages": list(messages)}, ensure_ascii=False, indent=1) + "\n"
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as problem:
        aside.unlink(missing_ok=True)
        reason = problem.strerror or str(problem)
        raise InputError(f"{str(path)!r} cannot be written: {reason}; give another name") from problem


def load(path: Path) -> list[dict[str, str]]:
    """The messages of a file: a system prompt or none, then turns of user and assistant, each one answered.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise InputError(f"{str(path)!r} cannot be read: {problem.strerror or problem}; check the path") from problem
    except (ValueError, RecursionError) as problem:  # ValueError: also what is not UTF-8
        raise InputError(f"{str(path)!r} is no JSON: {_REMEDY}") from problem
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list):
        raise InputError(f'{str(path)!r} has no list under "messages": {_REMEDY}')
    return _checked(messages, str(path))


def _checked(messages: list[Any], name: str) -> list[dict[str, str]]:
    """Without whatever else a message may hold."""
    offset = 1 if messages and isinstance(messages[0], dict) and messages[0].get("role") == "system" else 0
    for number, message in enumerate(messages):
        wanted = "system" if number < offset else ("user", "assistant")[(number - offset) % 2]
        if not isinstance(message, dict) or message.get("role") != wanted:
            raise InputError(f"{name!r}: message {number + 1} is none of the role {wanted}: {_REMEDY}")
        text = message.get("content")
        if not isinstance(text, str):
            raise InputError(f"{name!r}: message {number + 1} has no text as its content: {_REMEDY}")
        try:
            text.encode()
        except UnicodeEncodeError as problem:
            raise InputError(f"{name!r}: message {number + 1} is not Unicode: {_REMEDY}") from problem
    if (len(messages) - offset) % 2:
        raise InputError(f"{name!r} ends with a turn that has no answer: {_REMEDY}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
