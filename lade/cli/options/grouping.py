"""Option groups: a dataclass as one parameter of a command, and the group of output options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from lade.errors import ConfigError, MissingExtraError

T = TypeVar("T")


def in_panel(panel: str, **shared: Any) -> Callable[..., Any]:
    """`typer.Option` for the options of one panel of the help, with what they have in common."""
    return functools.partial(typer.Option, rich_help_panel=panel, **shared)


def grouped(command: Callable[..., T]) -> Callable[..., T]:
    """Make options of the fields of every parameter of a command that is annotated with a dataclass.

    The fields take the parameter's place, so the help lists options in the order of the signature. A parameter that is
    a group needs no default: its fields have theirs.

    Args:
        command: whose annotations are those that typer wants, or dataclasses whose fields have such ones.
    """
    own = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {each.name: each.annotation for each in own if is_dataclass(each.annotation)}

    @functools.wraps(command)
    def run(**values: Any) -> T:
        for name, kind in groups.items():
            values[name] = kind(**{each.name: values.pop(each.name) for each in fields(kind)})
        return command(**values)

    parameters = []
    for each in own:
        parameters += _options_of(each.annotation) if each.name in groups else [_by_keyword(each)]
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    del run.__dict__["__wrapped__"]  # else typer would look at the command's own signature
    return run


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    defaults = {
        each.name: inspect.Parameter.empty if each.default is MISSING else each.default for each in fields(group)
    }
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
        for name, default in defaults.items()
    ]


def _by_keyword(parameter: inspect.Parameter) -> inspect.Parameter:
    """Typer calls by keywords anyhow, and so parameters with and without a default may stand in any order."""
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)


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
