"""Options shared by several commands; groups of them: a dataclass as one parameter of a command, help without types."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from lade import ConfigError

T = TypeVar("T")
Takes = tuple[Callable[[Any], bool], str]
"""Which values an option takes, and what to give in place of others."""
AT_LEAST_ONE: Takes = (lambda value: value >= 1, "give a whole number >= 1")
_OPTION, _TAKES = "option", "takes"
"""Keys of a field's metadata: the `typer.Option` to show for it, and its name with what it takes."""


def option(
    default: Any,
    metavar: str,
    help: str,
    *names: str,
    panel: str | None = None,
    words: Sequence[str] = (),
    one_of: Sequence[str] = (),
    takes: Takes | None = None,
    repr: bool = True,
    **more: Any,
) -> Any:
    """Return a field of a group that is an option.

    Args:
        default: its value if it is not given; `MISSING` if it has to be.
        metavar: placeholder of its value in the help; "" for a flag.
        help: its line in the help.
        names: names as typed; none for the field's own.
        panel: panel of the help; None for that of the command.
        words: values that the shell completes, among others that it takes.
        one_of: the only values that it takes, which the shell completes.
        takes: which values it takes, see `Checked`.
        repr: False for a secret.
        more: further arguments of `typer.Option`.
    """
    if words or one_of:
        more["autocompletion"] = lambda: list(words or one_of)
    if one_of:
        takes = (lambda value: value in one_of), f"give one of {', '.join(one_of)}"
    shown = typer.Option(*names, metavar=metavar or None, help=help, rich_help_panel=panel, **more)
    return field(default=default, repr=repr, metadata={_OPTION: shown, _TAKES: takes and (names[:1], *takes)})


def options_in(panel: str) -> Callable[..., Any]:
    """Return `option` for one panel of the help."""
    return functools.partial(option, panel=panel)


@dataclass(frozen=True)
class Checked:
    """Base of groups whose options do not take all values of their types."""

    def check(self) -> None:
        """Raise `ConfigError` for a value that its option does not take."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None or (checked := each.metadata.get(_TAKES)) is None:
                continue
            names, fits, remedy = checked
            if not fits(value):
                name = names[0].removeprefix("--") if names else each.name.replace("_", "-")
                raise ConfigError(name, value, remedy)


def grouped(command: Callable[..., T]) -> Callable[..., T]:
    """Expand every parameter annotated with a dataclass into options, one per field.

    The fields take the parameter's place, so the help lists options in the order of the signature.
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
        # By keyword, so that defaults may stand in any order: typer calls by keyword.
        own_option = each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        parameters += _options_of(each.annotation) if each.name in groups else [own_option]
    run.__dict__["__signature__"] = inspect.Signature(parameters)
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    del run.__dict__["__wrapped__"]  # typer would inspect the original signature
    return run


def _options_of(group: Any) -> list[inspect.Parameter]:
    hints, found = get_type_hints(group, include_extras=True), []
    for each in fields(group):
        default = inspect.Parameter.empty if each.default is MISSING else each.default
        shown, kind = each.metadata.get(_OPTION), hints[each.name]
        hint = kind if shown is None else Annotated[kind, shown]
        found.append(inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    return found


class _WithoutTypes:
    """Shows a placeholder such as FILE beside an option in the help, and never a Python type."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return arguments and options, --help included."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in parameters:
            if getattr(each, "is_flag", False):
                each.metavar = ""
            elif isinstance(each, TyperArgument):  # its name stands in the first column
                each.__dict__["display_type_rich"] = lambda ctx: None
        return parameters


class ShellCommand(_WithoutTypes, TyperCommand):
    """A command of the shell."""


class ShellGroup(_WithoutTypes, TyperGroup):
    """A group of commands of the shell."""


_flag = options_in("Output")


@dataclass(frozen=True)
class Output:
    """Verbosity options; see `terminal.Terminal`."""

    quiet: bool = _flag(False, "", "Only results, warnings and errors.", "--quiet", "-q", envvar="LADE_QUIET")
    no_color: bool = _flag(False, "", "No colours, as with the variable NO_COLOR.", "--no-color")
    debug: bool = _flag(False, "", "Show tracebacks, warnings, logs, transformers' messages.", "--debug")


def check_out(path: Path) -> None:
    """Raise `ConfigError` if no file can be written at the path of `--out`."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError("out", str(path), f"the folder {folder} does not exist: create it")
    if path.exists() and not path.is_file():
        raise ConfigError("out", str(path), "not a regular file: give the name of a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError("out", str(path), "not writable: check the permissions")
