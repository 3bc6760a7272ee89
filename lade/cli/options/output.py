"""Options about what a command says besides its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

PANEL = "Output"


def _flag(*names: str, envvar: str | None = None, help: str) -> Any:
    return typer.Option(*names, metavar="", envvar=envvar, help=help, rich_help_panel=PANEL)


@dataclass(frozen=True)
class Output:
    """What is said besides results; see `terminal.Terminal`.

    Attributes:
        quiet: only results, warnings and errors.
        no_color: no colours, whatever the terminal can show.
        debug: tracebacks, all warnings, and what transformers logs.
    """

    quiet: Annotated[
        bool,
        _flag("--quiet", "-q", envvar="LADE_QUIET", help="Only results, warnings and errors."),
    ] = False
    no_color: Annotated[bool, _flag("--no-color", help="No colours; so does the variable NO_COLOR.")] = False
    debug: Annotated[
        bool,
        _flag("--debug", help="Show tracebacks, warnings, logs, transformers' messages."),
    ] = False
