"""Line editing, history and multi-line input.

A line that ends with a backslash continues on the next one. Three double quotes open a text of several lines, and three
of them at the end of a line close it. Lines that are pasted together stay together.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import platformdirs

_QUOTES = '"""'
_MORE = "...> "
_LONGEST_HISTORY = 1000


@dataclass(frozen=True)
class Entry:
    """Text typed by the user.

    Attributes:
        text: one line or several, without the marks that join them.
        quoted: the text stood in triple quotes, so that it is not a command.
    """

    text: str
    quoted: bool = False


def history_path() -> Path:
    """Return the file of the chat history."""
    return Path(platformdirs.user_state_dir("lookahead-decoding", appauthor=False)) / "chat_history"


class LineInput:
    """Standard input, line by line.

    Args:
        history: file of the lines typed on a terminal; None keeps them in memory.
    """

    def __init__(self, history: Path | None = None) -> None:
        self.problem: str | None = None
        """Reason why the history cannot be kept; None if there is none."""
        self._history = history
        self._readline = _readline() if self.edits else None
        if self._readline is not None:
            self._load_history()

    @property
    def edits(self) -> bool:
        """True if lines can be edited, as input and output are a terminal."""
        return sys.stdin.isatty() and sys.stdout.isatty()

    def entry(self, prompt: str) -> Entry | None:
        """Return the next line, or joined lines; None at the end of input.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, which drops the entry.
        """
        line = self._line(prompt)
        if line is None:
            return None
        if line.lstrip().startswith(_QUOTES):
            return Entry(self._quoted(line.lstrip().removeprefix(_QUOTES)), quoted=True)
        lines = [line]
        while lines[-1].endswith("\\") and (more := self._line(_MORE)) is not None:
            lines[-1:] = [lines[-1][:-1], more]
        return Entry("\n".join(lines))

    def _quoted(self, line: str | None) -> str:
        """Return the text up to the closing quotes, or to the end of input."""
        lines: list[str] = []
        while line is not None and not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            line = self._line(_MORE)
        if line is not None:
            lines.append(line.rstrip().removesuffix(_QUOTES))
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """Return the next line without its newline; None at the end of input."""
        if not self.edits:
            if sys.stdin.isatty():
                sys.stderr.write(prompt)  # standard output carries answers only
                sys.stderr.flush()
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        known = self._history_length()
        try:
            line = input(prompt)
        except EOFError:
            return None
        self._append_history(self._history_length() - known)
        return line

    def _history_length(self) -> int:
        return 0 if self._readline is None else self._readline.get_current_history_length()

    def _load_history(self) -> None:
        assert self._readline is not None
        if "libedit" not in (self._readline.__doc__ or ""):
            self._readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one entry
        self._readline.set_history_length(_LONGEST_HISTORY)
        if self._history is None:
            return
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)  # private
            self._readline.read_history_file(self._history)
        except OSError as problem:
            self._drop_history(problem)

    def _append_history(self, lines: int) -> None:
        """Append the latest lines to the history at once, as a chat may be killed, or run beside another one."""
        if self._readline is None or self._history is None or lines < 1:
            return
        try:
            if hasattr(self._readline, "append_history_file"):
                self._readline.append_history_file(lines, self._history)
            else:  # built on libedit
                self._readline.write_history_file(self._history)
        except OSError as problem:
            self._drop_history(problem)

    def _drop_history(self, problem: OSError) -> None:
        self.problem = f"the history cannot be kept in {str(self._history)!r}: {problem.strerror or problem}"
        self._history = None


def _readline() -> ModuleType | None:
    """Return the readline module, whose import gives `input` editing and history; None where Python lacks it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
