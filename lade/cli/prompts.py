"""Prompts from the command line, a file, or standard input: texts, or the messages of a conversation."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from lade.errors import InputError

Messages = list[dict[str, Any]]
ONE_A_LINE = 'give one {"prompt": "..."} or {"messages": [...]} a line'


@dataclass(frozen=True)
class Prompt:
    """What is to be continued or answered.

    Attributes:
        text: of a prompt; of a conversation, its last message.
        messages: a conversation as chat templates take it; None for a text.
    """

    text: str
    messages: Messages | None = None

    def as_dict(self) -> dict[str, Any]:
        """As a line of a file of prompts has it."""
        return {"prompt": self.text} if self.messages is None else {"messages": self.messages}


@dataclass(frozen=True)
class Source:
    """Options that name the prompts of a command.

    Attributes:
        text: the positional argument: a prompt; "-" is standard input, of which one newline at the end is taken off.
        prompt: `--prompt`.
        prompts: `.jsonl`: one prompt a line under the key `prompt`, or one conversation under the key `messages`;
            anything else: one prompt, exactly as it is.
    """

    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt. Not given, or -: standard input.")
    ] = None
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt, too.")] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help="A text file with one prompt, or a .jsonl file with one per line."
        ),
    ] = None

    @property
    def piped(self) -> bool:
        """Whether it is standard input."""
        return self.text in (None, "-") and self.prompt is None and self.prompts is None

    def check(self) -> None:
        """Raise `InputError` if several prompts are named, or none and there is only a keyboard."""
        given = sum(each is not None for each in (self.text, self.prompt, self.prompts))
        if given > 1 or (not given and sys.stdin.isatty()):
            raise InputError(
                "exactly one prompt is needed: give it as an argument, as --prompts FILE, or through a pipe"
            )

    def read(self) -> list[Prompt]:
        """The prompts, none of them empty.

        Raises:
            InputError: see `check`; or one cannot be read.
        """
        self.check()
        if self.prompts is not None:
            return read_file(self.prompts)
        given = self.text if self.prompt is None else self.prompt
        if given is None or given == self.text == "-":
            given = _utf8(sys.stdin.buffer.read(), "standard input").removesuffix("\n")
            if not given:
                raise InputError("standard input is empty: give a prompt there, as an argument, or as --prompts FILE")
        check_text(given, "the prompt")
        return [Prompt(given)]


def read_text(path: Path, what: str) -> str:
    """The text of a file, named `what` in messages, such as what an answer is expected to follow.

    Raises:
        InputError: it cannot be read, or is empty.
    """
    text = _read(path, f"{what} file")
    check_text(text, f"the {what}")
    return text


def read_file(path: Path) -> list[Prompt]:
    """The prompts of a file: of `.jsonl` one a line, of anything else one.

    Raises:
        InputError: it cannot be read, or has no prompt.
    """
    if path.suffix == ".jsonl":
        return list(numbered_prompts(path).values())
    text = _read(path)
    check_text(text, "the prompt")
    return [Prompt(text)]


def numbered_prompts(path: Path) -> dict[int, Prompt]:
    """The prompts of a `.jsonl` file by the numbers of their lines, from 1; empty lines are passed over.

    Raises:
        InputError: the file cannot be read, has no lines, or has one without a prompt.
    """
    lines = enumerate(_read(path).split("\n"), start=1)
    prompts = {number: _from_line(line, f"{str(path)!r} line {number}") for number, line in lines if line.strip()}
    if not prompts:
        raise InputError(f"prompt file {str(path)!r} has no lines: {ONE_A_LINE}")
    return prompts


def check_text(text: str, name: str) -> None:
    """Raise `InputError` for an empty text and for one that is no Unicode."""
    if not text:
        raise InputError(f"{name} is empty: give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise InputError(f"{name} is not UTF-8 at character {problem.start}: save or type it as UTF-8") from problem


def _read(path: Path, kind: str = "prompt file") -> str:
    name = f"{kind} {str(path)!r}"
    try:
        raw = path.read_bytes()
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(f"{name} cannot be read: {reason}; check path and permissions") from problem
    return _utf8(raw, name)


def _from_line(line: str, place: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as problem:
        raise InputError(f"{place} is no JSON ({problem}): {ONE_A_LINE}") from problem
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise InputError(f'{place} has no text under "prompt", and no list under "messages": {ONE_A_LINE}')
    if "messages" in entry:
        return _conversation(entry["messages"], place)
    text = entry["prompt"]
    if not isinstance(text, str):
        raise InputError(f'{place} has no text under "prompt": {ONE_A_LINE}')
    check_text(text, f"{place}: the prompt")
    return Prompt(text)


def _conversation(messages: Any, place: str) -> Prompt:
    """What stands in messages beside role and content is for the chat template to understand."""
    remedy = 'give objects such as {"role": "user", "content": "..."}'
    if not isinstance(messages, list) or not messages:
        raise InputError(f'{place} has no list of messages under "messages": {remedy}')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"{place}: message {number} has no role or no content: {remedy}")
    check_text(json.dumps(messages, ensure_ascii=False), f"{place}: the conversation")
    last = messages[-1]["content"]
    return Prompt(last if isinstance(last, str) else json.dumps(last, ensure_ascii=False), messages)


def _utf8(raw: bytes, name: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise InputError(f"{name} is not UTF-8 at byte {problem.start}: save it as UTF-8") from problem
