"""The terminal: console, status line, progress bars, errors and exit codes."""

from __future__ import annotations

import json
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import RLock, Timer
from typing import Any, TextIO

import typer
from rich import progress
from rich.console import Console
from rich.progress import Progress as status_Progress
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from lade.cli.options.grouping import Output
from lade.errors import FallbackWarning, LadeError, PrecisionWarning

DELAY_S = 0.3
"""What is over sooner is not worth a line that flickers."""
_OPTIONS = {
    "`generate`": "plain decoding",
    "`lade.invariant(model)`": "--invariant",
    "loading the model in float32": "--dtype float32",
}


class Status:
    """The line, with a wheel that turns and the seconds that the present work has taken.

    Args:
        console: a terminal that nothing else writes to by this object.
        shown: whether to show anything at all.
    """

    def __init__(self, console: Console, *, shown: bool) -> None:
        self._console, self._shown, self._lock = console, shown, RLock()
        self._text, self._held = "", 0
        self._progress: status_Progress | None = None
        self._timer: Timer | None = None

    def show(self, text: str) -> None:
        """Say what is going on now, until something else is said; nothing while `hold` is in force."""
        with self._lock:
            if not self._shown or self._held or text == self._text:
                return
            self._text = text
            if self._progress is None:
                columns = (SpinnerColumn(), TextColumn("{task.description}", style="dim"), TimeElapsedColumn())
                options: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
                self._progress = status_Progress(*columns, console=self._console, transient=True, **options)
                self._progress.add_task(text, total=None)
                self._timer = Timer(DELAY_S, self._begin, [self._progress])
                self._timer.daemon = True
                self._timer.start()
            else:
                self._progress.reset(self._progress.task_ids[0], description=text)

    def hide(self) -> None:
        """Take the line away."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._progress is not None:
                self._progress.stop()
            self._text, self._progress, self._timer = "", None, None

    def hold(self, held: bool) -> None:
        """Keep the line away while something else moves on the terminal, such as a bar; as often off as on."""
        self.hide()
        self._held += 1 if held else -1

    def _begin(self, progress: status_Progress) -> None:
        with self._lock:
            if self._progress is progress:
                progress.start()


class YieldingConsole(Console):
    """A console before whose output a status line goes away, for good while bars or panels move on it."""

    def __init__(self, status: Status, **options: Any) -> None:
        super().__init__(**options)
        self._status = status

    def print(self, *objects: Any, **options: Any) -> None:
        """As `Console.print`."""
        self._status.hide()
        super().print(*objects, **options)

    def set_live(self, live: Any) -> Any:
        """As `Console.set_live`."""
        self._status.hold(True)
        return super().set_live(live)

    def clear_live(self) -> None:
        """As `Console.clear_live`."""
        super().clear_live()
        self._status.hold(False)


class LogHandler(logging.Handler):
    """Shows what the library logs: what it is doing as the status, warnings as lines, with --debug all as lines.

    Args:
        term: a `terminal.Terminal`.
    """

    def __init__(self, term: Any) -> None:
        super().__init__()
        self._term = term

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        if record.levelno >= logging.WARNING:
            self._term.say(in_the_shell(record.getMessage()), "yellow")
        elif self._term.debug:
            self._term.say(f"{record.name}: {record.getMessage()}", "dim")
        elif record.levelno >= logging.INFO:
            self._term.working(record.getMessage())


def in_the_shell(text: str) -> str:
    """A warning of the library, in terms of options."""
    for call, option in _OPTIONS.items():
        text = text.replace(call, option)
    return text


EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
ASIDE = "dim"
_NO_ROOM = "the memory is full: take a smaller model, dtype, batch or budget, or fewer beams or tokens"
SAYS_ALL = Output()
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])  # all but tab and newline


class Terminal:
    """Standard output for results, standard error for everything said about them.

    Args:
        output: what is to be said besides results.
    """

    def __init__(self, output: Output = SAYS_ALL) -> None:
        colors: dict[str, Any] = {"no_color": True} if output.no_color else {}  # else rich decides, NO_COLOR included
        self.debug, self.quiet = output.debug, output.quiet
        own = Console(highlight=False, stderr=True, **colors)
        self._status = Status(own, shown=own.is_interactive and not (self.quiet or self.debug))
        self.out: Console = YieldingConsole(self._status, highlight=False, **colors)
        self.err: Console = YieldingConsole(self._status, highlight=False, stderr=True, **colors)
        self.fallbacks: list[str] = []
        self._within_line = False
        self.closing = ExitStack()
        self.heard: Callable[[str], None] | None = None  # is told what is going on, wherever it is shown

    @property
    def interactive(self) -> bool:
        """Whether results go to a terminal."""
        return self.out.is_terminal

    @property
    def animated(self) -> bool:
        """Whether to show progress: on a terminal, unless --quiet."""
        return self.err.is_interactive and not self.quiet

    def working(self, text: str) -> None:
        """Show what is going on until there is something else to see; nothing off a terminal, or with --debug.

        Nor within a line of a text, such as the prompt that its continuation follows: that would be wiped out.
        """
        if self.heard is not None:
            self.heard(text)
        elif not self._within_line:
            self._status.show(text)

    def resting(self) -> None:
        """Show that no more."""
        self._status.hide()

    def pausing(self, paused: bool) -> None:
        """Show nothing of the kind while others write to the terminal, such as the hub's bars."""
        self._status.hold(paused)

    def write(self, text: str, style: str = "") -> None:
        """Write a piece of generated text: coloured and without control codes on a terminal, as it is in a pipe."""
        if self.out.quiet:
            return
        if self.interactive:
            self._within_line = not text.endswith("\n")
            segment = Segment(text.translate(_CONTROLS), Style.parse(style))
            self.out.print(Segments([segment]), end="", soft_wrap=True)
        else:
            self.resting()  # on standard error, which may be the terminal still
            self.out.file.write(text)
        self.out.file.flush()

    def mute(self) -> None:
        """Write errors alone from now on: another process with the same command line writes the rest."""
        self.resting()
        self.quiet = self.out.quiet = True

    def write_json(self, value: dict[str, Any]) -> None:
        """Write one object on one line."""
        self.write(json.dumps(value) + "\n")

    def say(self, text: str | Text, style: str = "") -> None:
        """One line to standard error; what is dim is said in passing, which --quiet silences."""
        if not (self.quiet and style == ASIDE):
            self.err.print(Text(text, style) if isinstance(text, str) else text, soft_wrap=True)

    def fail(self, problem: BaseException | str) -> None:
        """The one line of an error."""
        self.say(Text.assemble(("error: ", "bold red"), one_line(problem)))

    def show_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Stands in for `warnings.showwarning`: a fallback is one yellow line, said once; precision a dim one."""
        text = one_line(message)
        if issubclass(category, PrecisionWarning):
            self.say(in_the_shell(text), ASIDE)
            return
        if not issubclass(category, FallbackWarning):
            self.say(warnings.formatwarning(message, category, filename, lineno, line).rstrip(), "dim")
            return
        if text not in self.fallbacks:
            self.say(text, "yellow")
        self.fallbacks.append(text)


@contextmanager
def terminal(output: Output = SAYS_ALL) -> Iterator[Terminal]:
    """A terminal for one command; bad input leaves it as one line on standard error and exit code 2."""
    term = Terminal(output)
    term.working("starting")
    try:
        with term.closing, _logging(term), warnings.catch_warnings():
            term.closing.callback(term.resting)
            warnings.simplefilter("default" if term.debug else "ignore")
            for category in (FallbackWarning, PrecisionWarning):
                warnings.simplefilter("always", category)
            warnings.showwarning = term.show_warning
            yield term
    except Exception as problem:
        line = _one_line_for(problem)
        if line is None:
            raise
        if term.debug:
            term.say(traceback.format_exc())
        term.fail(line)
        raise typer.Exit(EXIT_BAD_INPUT) from None
    except KeyboardInterrupt:
        term.say("interrupted", "yellow")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _one_line_for(problem: Exception) -> str | None:
    """The message of an error that the user or a full machine causes; None for one of this program."""
    if isinstance(problem, LadeError):
        return str(problem)
    # Torch is not imported just to ask for its class; on the CPU it raises a plain RuntimeError.
    words = ("can't allocate memory", "not enough memory", "out of memory")
    full = isinstance(problem, RuntimeError) and any(word in str(problem) for word in words)
    if full or isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return f"{_NO_ROOM} ({one_line(problem, 200)})"
    if isinstance(problem, OSError) and not isinstance(problem, BrokenPipeError):
        return f"{one_line(problem, 300)}: check paths, permissions and room on the disk"
    return None


@contextmanager
def _logging(term: Terminal) -> Iterator[None]:
    """What the library logs is shown while a command runs."""
    logger, handler = logging.getLogger("lade"), LogHandler(term)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if term.debug else logging.INFO if term.animated else logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def one_line(problem: BaseException | str, limit: int = 500) -> str:
    """The message of a problem on one line, not longer than `limit` characters: what is too long lacks its middle."""
    text, tail = " ".join(str(problem).split()) or type(problem).__name__, limit // 3
    return text if len(text) <= limit else f"{text[: limit - 3 - tail]}...{text[-tail:]}"


class Progress(progress.Progress):
    """A bar of rich, of which versions before 15 end even a disabled one with an empty line off a terminal."""

    def stop(self) -> None:
        """As `rich.progress.Progress.stop`; a no-op where the bar is disabled."""
        if not self.disable:
            super().stop()


def count(value: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 step`, `2 steps`."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"
