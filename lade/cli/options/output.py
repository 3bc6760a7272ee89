"""Options about what a command says besides its results."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from lade.cli.options.grouping import in_panel
from lade.errors import ConfigError, MissingExtraError

PANEL = "Output"
PICTURES = (".svg", ".png", ".pdf")


_flag = in_panel(PANEL, metavar="")


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


def check_picture(file: Path) -> None:
    """Raise what would keep a picture from being drawn into a file.

    Raises:
        ConfigError: the name has another ending, or there is no such folder.
        MissingExtraError: matplotlib is not installed.
    """
    if file.suffix.lower() not in PICTURES:
        raise ConfigError("out", str(file), f"give a name that ends in {', '.join(PICTURES)}")
    if file.is_dir():
        raise ConfigError("out", str(file), "it is a folder: give the name of a file")
    if not file.absolute().parent.is_dir():
        raise ConfigError("out", str(file), f"the folder {file.absolute().parent} does not exist: create it")
    check_drawing()


def check_drawing() -> None:
    """Raise `MissingExtraError` where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "bench")
