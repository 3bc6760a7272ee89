"""For Ray Serve: `serve run lade.replicas:app model=NAME replicas=2`; `pip install "lookahead-decoding[scale]"`."""

from __future__ import annotations

from typing import Any

from lade.cli.serve.command import application_of


def app(args: dict[str, str]) -> Any:
    """An application of Ray Serve: the app of `lade serve` in each replica, behind one port.

    Args:
        args: options of `lade serve`, without dashes: `model=gpt2 replicas=1 max_replicas=4 max_rows=8 page=false`.
            Where it listens is Ray's to decide.

    Returns:
        A `ray.serve.Application`.

    Raises:
        ConfigError, InputError, MissingExtraError: an option that there is not, or that is wrong.
    """
    return application_of(args)
