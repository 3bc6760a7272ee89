"""Prompts as texts or conversations, and files of them."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lade import InputError

Messages = list[dict[str, Any]]
ONE_PER_LINE = 'write {"prompt": "..."} or {"messages": [...]} on each line'


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a conversation to answer."""

    text: str  # of the prompt, or of the conversation's last message
    messages: Messages | None = None  # a conversation in the format of chat templates


def read_text(path: Path, what: str) -> str:
    """Return the text of a file, which messages call `what`; raises `InputError` if it cannot be read, or is empty."""
    text = read_utf8(path, f"{what} file")
    check_text(text, f"the {what}")
    return text


def read_file(path: Path) -> list[Prompt]:
    """Return the prompts of a file: one per line of a `.jsonl` file, one of any other file; or raise `InputError`."""
    text = read_utf8(path, "prompt file")
    if path.suffix != ".jsonl":
        check_text(text, "the prompt")
        return [Prompt(text)]
    prompts = [_prompt(entry, place) for _, place, entry in json_lines(text, path, ONE_PER_LINE)]
    if not prompts:
        raise InputError(f"prompt file {str(path)!r} has no lines: {ONE_PER_LINE}")
    return prompts


def check_text(text: str, name: str) -> None:
    """Raise `InputError` for an empty text, and for one that cannot be encoded as UTF-8."""
    if not text:
        raise InputError(f"{name} is empty: give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise InputError(f"{name} is not UTF-8 at character {problem.start}: save or type it as UTF-8") from problem


def read_utf8(path: Path, kind: str) -> str:
    """Return the text of a file, which messages call by its kind and path; or raise `InputError`."""
    name = f"{kind} {str(path)!r}"
    try:
        raw = path.read_bytes()
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(f"{name} cannot be read: {reason}; check path and permissions") from problem
    return decoded(raw, name)


def json_lines(text: str, path: Path, remedy: str) -> Iterator[tuple[int, str, Any]]:
    """Yield number, place for messages, and value of each line that is not empty; raises `InputError` for no JSON."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{str(path)!r} line {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as problem:
                raise InputError(f"{place} is not JSON ({problem}): {remedy}") from problem
            yield number, place, value


def _prompt(entry: Any, place: str) -> Prompt:
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise InputError(f'{place} has no text under "prompt", and no list under "messages": {ONE_PER_LINE}')
    if "messages" in entry:
        return _conversation(entry["messages"], place)
    text = entry["prompt"]
    if not isinstance(text, str):
        raise InputError(f'{place} has no text under "prompt": {ONE_PER_LINE}')
    check_text(text, f"{place}: the prompt")
    return Prompt(text)


def _conversation(messages: Any, place: str) -> Prompt:
    """Return the prompt of a conversation; further keys of messages are left to the chat template."""
    remedy = 'give objects such as {"role": "user", "content": "..."}'
    if not isinstance(messages, list) or not messages:
        raise InputError(f'{place} has no list of messages under "messages": {remedy}')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"{place}: message {number} has no role or no content: {remedy}")
    check_text(json.dumps(messages, ensure_ascii=False), f"{place}: the conversation")
    last = messages[-1]["content"]
    return Prompt(last if isinstance(last, str) else json.dumps(last, ensure_ascii=False), messages)


def decoded(raw: bytes, name: str) -> str:
    """Return UTF-8 as text; raises `InputError`, which calls it by a name."""
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")  # some editors begin files with that mark
    except UnicodeDecodeError as problem:
        raise InputError(f"{name} is not UTF-8 at byte {problem.start}: save it as UTF-8") from problem
