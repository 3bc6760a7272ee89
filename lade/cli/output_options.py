"""Options about what a command says besides its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

PANEL = "Output"


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
        typer.Option(
            "--quiet", "-q", envvar="LADE_QUIET", help="Only results, warnings, errors.", rich_help_panel=PANEL
        ),
    ] = False
    no_color: Annotated[
        bool, typer.Option("--no-color", help="No colours. So does the variable NO_COLOR.", rich_help_panel=PANEL)
    ] = False
    debug: Annotated[
        bool,
        typer.Option("--debug", help="Show tracebacks, warnings, transformers' messages.", rich_help_panel=PANEL),
    ] = False
