"""Ray Serve deployment: `serve run lade.replicas:app model=NAME replicas=2`.

Needs the extra `[scale]`.
"""

from __future__ import annotations

from typing import Any

from lade.cli.serve.command import application_of


def app(args: dict[str, str]) -> Any:
    """Build a Ray Serve application that runs `lade serve` in each replica, behind one port.

    Args:
        args: options of `lade serve`, without dashes: `model=gpt2 replicas=1 max_replicas=4 max_rows=8 page=false`.
            Host and port are Ray's.

    Returns:
        A `ray.serve.Application`.

    Raises:
        ConfigError, InputError, MissingExtraError: an option is unknown or invalid.
    """
    return application_of(args)
