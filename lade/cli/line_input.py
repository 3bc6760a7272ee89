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
    """What was typed.

    Attributes:
        text: of one line or several, without the marks that join them.
        quoted: whether it stood between quotes; then it is no command, whatever it begins with.
    """

    text: str
    quoted: bool = False


def history_path() -> Path:
    """Where what is typed is kept from one chat to the next."""
    return Path(platformdirs.user_state_dir("lookahead-decoding", appauthor=False)) / "chat_history"


class LineInput:
    """Standard input, line by line.

    Args:
        history: file that keeps the lines of a terminal; None: they are kept until the end of the process.
    """

    def __init__(self, history: Path | None = None) -> None:
        self.problem: str | None = None
        """Why the history cannot be kept; None if it is, or is not to be."""
        self._history = history
        self._readline = _readline() if self.edits else None
        if self._readline is not None:
            self._begin()

    @property
    def edits(self) -> bool:
        """Whether lines can be edited: input and output are a terminal."""
        return sys.stdin.isatty() and sys.stdout.isatty()

    def entry(self, prompt: str) -> Entry | None:
        """The next line, or those that belong together; None at the end of input.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; what was typed of the entry is dropped.
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
        """Up to the closing quotes, or to the end of input."""
        lines: list[str] = []
        while line is not None and not line.rstrip().endswith(_QUOTES):
            lines.append(line)
            line = self._line(_MORE)
        if line is not None:
            lines.append(line.rstrip().removesuffix(_QUOTES))
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """Without its end; None at the end of input."""
        if not self.edits:
            if sys.stdin.isatty():
                sys.stderr.write(prompt)  # standard output has the answers
                sys.stderr.flush()
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        known = self._length()
        try:
            line = input(prompt)
        except EOFError:
            return None
        self._keep(self._length() - known)
        return line

    def _length(self) -> int:
        return 0 if self._readline is None else self._readline.get_current_history_length()

    def _begin(self) -> None:
        assert self._readline is not None
        if "libedit" not in (self._readline.__doc__ or ""):
            self._readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one entry
        self._readline.set_history_length(_LONGEST_HISTORY)
        if self._history is None:
            return
        try:
            self._history.parent.mkdir(parents=True, exist_ok=True)
            self._history.touch(mode=0o600)  # what was said is for the user alone
            self._readline.read_history_file(self._history)
        except OSError as problem:
            self._give_up(problem)

    def _keep(self, lines: int) -> None:
        """Write the latest lines of the history at once: a chat may be ended in any way, and beside another one."""
        if self._readline is None or self._history is None or lines < 1:
            return
        try:
            if hasattr(self._readline, "append_history_file"):
                self._readline.append_history_file(lines, self._history)
            else:  # built on libedit
                self._readline.write_history_file(self._history)
        except OSError as problem:
            self._give_up(problem)

    def _give_up(self, problem: OSError) -> None:
        self.problem = f"the history cannot be kept in {str(self._history)!r}: {problem.strerror or problem}"
        self._history = None


def _readline() -> ModuleType | None:
    """What gives `input` editing and a history, as soon as it is imported; not every Python has it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
