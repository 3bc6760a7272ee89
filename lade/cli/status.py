"""A line that says what is going on while there is nothing else to see: on a terminal only, and gone afterwards."""

from __future__ import annotations

import logging
from threading import RLock, Timer
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

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
        self._progress: Progress | None = None
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
                self._progress = Progress(*columns, console=self._console, transient=True, **options)
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

    def _begin(self, progress: Progress) -> None:
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
