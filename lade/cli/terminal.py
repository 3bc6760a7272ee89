"""The terminal: console, status line, progress bars, errors and exit codes."""

from __future__ import annotations

import json
import logging
import shlex
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, RLock, Thread, Timer
from time import monotonic
from typing import Any

import typer
from rich import progress
from rich.console import Console
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment, Segments
from rich.style import Style
from rich.text import Text

from lade import ConfigError, FallbackWarning, LadeError, PrecisionWarning
from lade.cli.options import Output

DELAY_S = 0.3
"""Work that is done sooner shows no status line, which would only flicker."""
LINE_S = 2.0
"""Off a terminal, work that takes longer is named by a line."""
LINE_EVERY_S = 30.0
"""Off a terminal, long work gives a sign of life that often."""
_OPTIONS = {
    "`generate`": "plain decoding",
    "`lade.invariant(model)`": "--invariant",
    "loading the model in float32": "--dtype float32",
}


class Status:
    """The current work: on a terminal a line with a spinner and the elapsed seconds, elsewhere a line if it takes long.

    Off a terminal work is named once it has taken `LINE_S`, once each; if it goes on, again every `LINE_EVERY_S`.
    """

    def __init__(self, console: Console, *, shown: bool) -> None:
        self._console, self._shown, self._lock = console, shown, RLock()
        self._current = ("", 0.0)  # the work, and when it began; one tuple, as two threads use it
        self._held = 0
        self._progress: progress.Progress | None = None
        self._timer: Timer | None = None
        self._named, self._ended = set[str](), Event()
        self._watch: Thread | None = None
        self._told_at = monotonic()

    def show(self, text: str) -> None:
        """Show the current work until the next call; ignored while `hold` is in force."""
        with self._lock:
            if not self._shown or self._held or text == self._current[0]:
                return
            self._current = (text, monotonic())
            if self._console.is_interactive:
                self._spin(text)
            elif self._watch is None:
                self._watch = Thread(target=self._run, name="lade-status", daemon=True)
                self._watch.start()

    def hide(self) -> None:
        """Remove the line; the work has ended."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._progress is not None:
                self._progress.stop()
            self._current, self._progress, self._timer = ("", 0.0), None, None

    def hold(self, held: bool) -> None:
        """Suspend the line while something else is animated on the terminal; calls nest."""
        self.hide()
        self._held += 1 if held else -1

    def tell(self, text: str) -> None:
        """Write how far the work is, off a terminal, every `LINE_EVERY_S`."""
        if self._shown and not self._console.is_interactive and monotonic() - self._told_at >= LINE_EVERY_S:
            self._write(text)

    def close(self) -> None:
        """Remove the line, and end the thread that waits for slow work."""
        self.hide()
        self._ended.set()
        if self._watch is not None:
            self._watch.join()

    def _spin(self, text: str) -> None:
        if self._progress is not None:
            self._progress.reset(self._progress.task_ids[0], description=text)
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}", style="dim"), TimeElapsedColumn())
        options: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}
        self._progress = progress.Progress(*columns, console=self._console, transient=True, **options)
        self._progress.add_task(text, total=None)
        self._timer = Timer(DELAY_S, self._begin, [self._progress])
        self._timer.daemon = True
        self._timer.start()

    def _begin(self, line: progress.Progress) -> None:
        with self._lock:
            if self._progress is line:
                line.start()

    def _run(self) -> None:
        while not self._ended.wait(LINE_S / 8):
            (text, begun), now = self._current, monotonic()
            if text and text not in self._named and now - begun >= LINE_S:
                self._named.add(text)
                self._write(text)
            elif text and now - max(begun, self._told_at) >= LINE_EVERY_S:
                self._write(f"{text}: {now - begun:.0f} s so far")

    def _write(self, text: str) -> None:
        self._told_at = monotonic()
        self._console.print(Text(text, "dim"), soft_wrap=True)


class YieldingConsole(Console):
    """Console that hides a status line before it prints, and suspends it during live displays."""

    def __init__(self, status: Status, **options: Any) -> None:
        super().__init__(**options)
        self._status = status

    def print(self, *objects: Any, **options: Any) -> None:
        """Hide the status line and print."""
        self._status.hide()
        super().print(*objects, **options)

    def set_live(self, live: Any) -> Any:
        """Suspend the status line and start a live display."""
        self._status.hold(True)
        return super().set_live(live)

    def clear_live(self) -> None:
        """End a live display and resume the status line."""
        super().clear_live()
        self._status.hold(False)


class LogHandler(logging.Handler):
    """Shows log records of the library: INFO as status, warnings as lines, with --debug all as lines."""

    def __init__(self, term: Any) -> None:
        super().__init__()
        self._term = term

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record."""
        if record.levelno >= logging.WARNING:
            self._term.say(in_the_shell(record.getMessage()), "yellow")
        elif self._term.debug:
            self._term.say(f"{record.name}: {record.getMessage()}", "dim")
        elif record.levelno >= logging.INFO:
            self._term.show_status(record.getMessage())


def in_the_shell(text: str) -> str:
    """Return a warning of the library with Python calls replaced by options of the shell."""
    for call, option in _OPTIONS.items():
        text = text.replace(call, option)
    return text


EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
ASIDE = "dim"
_NO_ROOM = "out of memory: use a smaller model, dtype, batch or budget, or fewer beams or tokens"
SAYS_ALL = Output()
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])  # all but tab and newline


class Terminal:
    """Writes results to standard output, and everything else to standard error."""

    def __init__(self, output: Output = SAYS_ALL) -> None:
        colors: dict[str, Any] = {"no_color": True} if output.no_color else {}  # else rich decides, NO_COLOR included
        self.debug, self.quiet = output.debug, output.quiet
        own = Console(highlight=False, stderr=True, **colors)
        self.status = Status(own, shown=not (self.quiet or self.debug))
        self.out: Console = YieldingConsole(self.status, highlight=False, **colors)
        self.err: Console = YieldingConsole(self.status, highlight=False, stderr=True, **colors)
        self._within_line = False
        self.closing = ExitStack()
        self.on_status: Callable[[str], None] | None = None  # receives the status in place of the status line

    @property
    def interactive(self) -> bool:
        """True if standard output is a terminal."""
        return self.out.is_terminal

    @property
    def animated(self) -> bool:
        """True if progress is shown: on a terminal, unless --quiet."""
        return self.err.is_interactive and not self.quiet

    def show_status(self, text: str) -> None:
        """Show the current work until something else is written; off a terminal as a line if it takes long.

        Also nothing in the middle of a line, such as after an echoed prompt, which the status would erase.
        """
        if self.on_status is not None:
            self.on_status(text)
        elif not self._within_line:
            self.status.show(text)

    def write(self, text: str, style: str = "") -> None:
        """Write generated text: styled and without control codes on a terminal, verbatim to a pipe."""
        if self.out.quiet:
            return
        if self.interactive:
            self._within_line = not text.endswith("\n")
            segment = Segment(text.translate(_CONTROLS), Style.parse(style))
            self.out.print(Segments([segment]), end="", soft_wrap=True)
        else:
            self.status.hide()  # standard error may still be the terminal
            self.out.file.write(text)
        self.out.file.flush()

    def mute(self) -> None:
        """Write only errors from now on: another process with the same command line writes the rest."""
        self.status.close()
        self.quiet = self.out.quiet = True

    def write_json(self, value: dict[str, Any]) -> None:
        """Write an object as a line of JSON."""
        self.write(json.dumps(value) + "\n")

    def say(self, text: str | Text, style: str = "") -> None:
        """Write a line to standard error; --quiet silences dim lines."""
        if not (self.quiet and style == ASIDE):
            self.err.print(Text(text, style) if isinstance(text, str) else text, soft_wrap=True)

    def fail(self, problem: BaseException | str) -> None:
        """Write the line of an error."""
        self.say(Text.assemble(("error: ", "bold red"), one_line(problem)))

    def show_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any, **named: Any
    ) -> None:
        """Replace `warnings.showwarning`: fallbacks are one yellow line, precision warnings dim."""
        if issubclass(category, PrecisionWarning):
            self.say(in_the_shell(one_line(message)), ASIDE)
        elif issubclass(category, FallbackWarning):
            self.say(one_line(message), "yellow")
        else:
            self.say(warnings.formatwarning(message, category, filename, lineno).rstrip(), "dim")


@contextmanager
def terminal(output: Output = SAYS_ALL) -> Iterator[Terminal]:
    """Yield a terminal for one command; errors of the user become one line on standard error and exit code 2."""
    term = Terminal(output)
    term.show_status("starting: importing torch and transformers")
    try:
        with term.closing, _logging(term), warnings.catch_warnings():
            term.closing.callback(term.status.close)
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
    """Return the message of an error caused by the user or by a full machine; None for a bug."""
    if isinstance(problem, ConfigError):
        return option_error(problem)
    if isinstance(problem, LadeError):
        return str(problem)
    # Torch is not imported only to name its class; on the CPU it raises a plain RuntimeError.
    words = ("can't allocate memory", "not enough memory", "out of memory")
    full = isinstance(problem, RuntimeError) and any(word in str(problem) for word in words)
    if full or isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return f"{_NO_ROOM} ({one_line(problem, 200)})"
    if isinstance(problem, OSError) and not isinstance(problem, BrokenPipeError):
        return f"{one_line(problem, 300)}: check paths, permissions and disk space"
    return None


def option_error(problem: ConfigError) -> str:
    """Return the message of a `ConfigError` with the option as the user typed it, such as `--top-p 3: give ...`."""
    if not problem.field.islower():  # no option, but a part of its value
        return str(problem)
    option, value = f"--{problem.field.replace('_', '-')}", problem.value
    if value is not None and value is not True:
        option += f" {shlex.quote(str(value))}"
    return f"{option}: {problem.remedy}"


@contextmanager
def _logging(term: Terminal) -> Iterator[None]:
    """Show log records of the library while a command runs."""
    logger, handler = logging.getLogger("lade"), LogHandler(term)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if term.debug else logging.WARNING if term.quiet else logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def one_line(problem: BaseException | str, limit: int = 500) -> str:
    """Return a message as one line of at most `limit` characters, with its middle elided if longer."""
    text, tail = " ".join(str(problem).split()) or type(problem).__name__, limit // 3
    return text if len(text) <= limit else f"{text[: limit - 3 - tail]}...{text[-tail:]}"


class Progress(progress.Progress):
    """Progress bar that writes nothing where it is disabled, as rich did before version 15."""

    def stop(self) -> None:
        """Stop the bar, unless it is disabled."""
        if not self.disable:
            super().stop()


def count(value: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 step`, `2 steps`."""
    return f"{value:,} {noun if value == 1 else plural or noun + 's'}"
