"""The same options as those of `lade serve`, as arguments of an application of Ray Serve."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from lade.cli.options import decoding as options
from lade.cli.serve.checks import check_all
from lade.cli.serve.command import settings_of
from lade.cli.serve.options import Access, Limits, Listening, ServedTemplate
from lade.cli.serve.scaling import Scaling, loader
from lade.errors import InputError

_USAGE_ERROR: Any = typer.BadParameter.__base__
"""Of an option that there is not, too; Typer has a Click of its own."""
_RAYS = {
    "host": "serve start --http-host",
    "port": "serve start --http-port",
    "log_format": "the logging_config of a deployment",
}


def application_of(arguments: Mapping[str, str]) -> Any:
    """What Ray Serve runs.

    Args:
        arguments: options of `lade serve` without their dashes: `{"model": "gpt2", "max_rows": "8", "page": "false"}`.

    Raises:
        ConfigError, InputError, MissingExtraError: an option that there is not, or that is wrong.
    """
    for name in sorted(_RAYS.keys() & arguments.keys()):
        raise InputError(f"{name} is Ray's to decide: use {_RAYS[name]}")
    words = [_word(name, str(value)) for name, value in arguments.items()]
    shell = typer.Typer()
    shell.command()(_application)
    try:
        return typer.main.get_command(shell).main(words, prog_name="lade.replicas:app", standalone_mode=False)
    except _USAGE_ERROR as problem:
        raise InputError(problem.format_message()) from None


def _word(name: str, value: str) -> str:
    option = name.replace("_", "-")
    if value.lower() in ("true", "false"):
        return f"--{option}" if value.lower() == "true" else f"--no-{option}"
    return f"--{option}={value}"


@options.grouped
def _application(
    *,
    listening: Listening,
    access: Access,
    limits: Limits,
    scaling: Scaling,
    template: ServedTemplate,
    speed: options.Speed,
    loading: options.Loading,
) -> Any:
    check_all(listening, access, limits, scaling, loading=loading, speed=speed, template=template)
    settings = settings_of(listening, access, limits, loading, template)
    load = loader(loading, speed, template.text())
    from lade.server.replicas import application

    return application(settings, load, scaling.scale(loading))
