"""What `lade serve`, `lade batch` and the application of Ray Serve check before anything is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

from lade.cli.options.decoding import Speed
from lade.cli.options.model import Loading
from lade.cli.serve.options import ServedTemplate
from lade.errors import MissingExtraError

_PACKAGES = ("fastapi", "uvicorn", "httptools", "prometheus_client")


class Group(Protocol):
    """Options that are checked together."""

    def check(self) -> None:
        """Raise `ConfigError` for what is wrong."""


def check_all(
    *groups: Group, loading: Loading, speed: Speed, template: ServedTemplate, new_memory: bool = False
) -> None:
    """Check what can be checked without a model.

    Args:
        groups: of options, in the order in which errors are told.
        loading: which model, and how.
        speed: how tokens are drafted; its memory has to be there.
        template: for chats.
        new_memory: whether the memory's file is written, and need not be there.

    Raises:
        MissingExtraError: what a server needs is not installed.
        ConfigError, InputError: an option is wrong.
    """
    for name in _PACKAGES:
        if find_spec(name) is None:
            raise MissingExtraError(name.replace("_", "-"), "serve")
    for group in (*groups, loading):
        group.check()
    speed.lookahead(new_memory=new_memory)  # raises for what is wrong with it
    if new_memory and speed.memory is not None:
        from lade.memory import check

        check(speed.memory)
    loading.check_layout(speed.pack, invariant=speed.invariant)
    template.check()
