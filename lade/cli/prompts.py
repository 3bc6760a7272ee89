"""Reading prompts from the command line, a file, or standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lade.errors import InputError


def read_prompts(source: str | None, prompt: str | None, prompt_file: Path | None) -> list[str]:
    """The prompts that the options name, none of them empty.

    Args:
        source: the positional argument; "-" is standard input, of which one newline at the end is taken off.
        prompt: the text itself.
        prompt_file: `.jsonl`: one prompt a line under the key `prompt`; anything else: one prompt, exactly as it is.

    Raises:
        InputError: not exactly one of them is given, or it cannot be read.
    """
    check_sources(source, prompt, prompt_file)
    if prompt_file is not None:
        prompts = _from_file(prompt_file)
    elif prompt is not None:
        prompts = [prompt]
    else:
        prompts = [_utf8(sys.stdin.buffer.read(), "standard input").removesuffix("\n")]
    for number, text in enumerate(prompts, start=1):
        check_text(text, f"prompt {number}" if len(prompts) > 1 else "the prompt")
    return prompts


def numbered_prompts(path: Path) -> dict[int, str]:
    """The prompts of a `.jsonl` file by the numbers of their lines, from 1; empty lines are passed over.

    Raises:
        InputError: the file cannot be read, has no lines, or has one without a prompt.
    """
    lines = enumerate(_read(path).split("\n"), start=1)
    prompts = {number: _from_line(line, f"{str(path)!r} line {number}") for number, line in lines if line.strip()}
    if not prompts:
        raise InputError(f'prompt file {str(path)!r} has no lines: give one {{"prompt": "..."}} a line')
    return prompts


def check_sources(source: str | None, prompt: str | None, prompt_file: Path | None) -> None:
    """Raise `InputError` unless exactly one prompt, or file of prompts, is named; see `read_prompts`."""
    if sum(given is not None for given in (source, prompt, prompt_file)) != 1:
        raise InputError(
            "exactly one prompt is wanted: give --prompt TEXT, --prompt-file FILE, or - for standard input"
        )
    if source not in (None, "-"):
        raise InputError(
            f"unexpected argument {source!r}: give the prompt as --prompt {source!r}, or - for standard input"
        )


def check_text(text: str, name: str) -> None:
    """Raise `InputError` for an empty text and for one that is no Unicode."""
    if not text:
        raise InputError(f"{name} is empty: give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise InputError(f"{name} is not UTF-8 at character {problem.start}: save or type it as UTF-8") from problem


def _from_file(path: Path) -> list[str]:
    return list(numbered_prompts(path).values()) if path.suffix == ".jsonl" else [_read(path)]


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(f"prompt file {str(path)!r} cannot be read: {reason}; check path and permissions") from problem
    return _utf8(raw, f"prompt file {str(path)!r}")


def _from_line(line: str, place: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError as problem:
        raise InputError(f'{place} is no JSON ({problem}): give one {{"prompt": "..."}} a line') from problem
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise InputError(f'{place} has no text under "prompt": give one {{"prompt": "..."}} a line')
    text: str = entry["prompt"]
    check_text(text, f"{place}: the prompt")
    return text


def _utf8(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise InputError(f"{name} is not UTF-8 at byte {problem.start}: save it as UTF-8") from problem
