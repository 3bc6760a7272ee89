"""Options about several replicas of a model, and what `serve run lade.replicas:app` does with the options of all."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

from lade.cli.options.grouping import in_panel
from lade.cli.options.model import Loading
from lade.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from lade.cli.options.decoding import Speed
    from lade.server.replicas import Scale
    from lade.server.served_model import ServedModel

_option = in_panel("Replicas")


@dataclass(frozen=True)
class Scaling:
    """How many servers of the model there are behind the port.

    Attributes:
        replicas: that there are, by Ray Serve; None: this process alone serves.
        max_replicas: that there may be when many requests come.
    """

    replicas: Annotated[
        int | None, _option(metavar="N", help="Servers of the model, each with an engine (Ray Serve).")
    ] = None
    max_replicas: Annotated[
        int | None, _option(metavar="N", help="So many when many requests come. Default: as --replicas.")
    ] = None

    def check(self) -> None:
        """Raise `ConfigError` for numbers that are none; `MissingExtraError` where Ray Serve is not installed."""
        if self.replicas is None and self.max_replicas is not None:
            raise ConfigError("max-replicas", self.max_replicas, "give --replicas, too: how many there are at least")
        if self.replicas is None:
            return
        if self.replicas < 1:
            raise ConfigError("replicas", self.replicas, "give a whole number >= 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError("max-replicas", self.max_replicas, f"give a whole number >= {self.replicas}")
        if find_spec("ray") is None:
            raise MissingExtraError("ray", "scale")

    def scale(self, loading: Loading) -> Scale:
        """The same for `lade.server.replicas`: cores are shared out, a GPU is each replica's own."""
        import torch

        from lade.server.replicas import Scale

        replicas = self.replicas or 1
        most = self.max_replicas or replicas
        on_gpu = loading.device in ("auto", "cuda") and torch.cuda.is_available()
        return Scale(replicas, most, cpus=max(1, (os.cpu_count() or 1) // most), gpus=int(on_gpu))


def loader(loading: Loading, speed: Speed, chat_template: str | None) -> Callable[[], ServedModel]:
    """What a replica loads the model with; see `model.load`. All begin with one memory, and none writes it."""
    return partial(_load, loading, speed, chat_template)


def _load(loading: Loading, speed: Speed, chat_template: str | None) -> ServedModel:
    from lade.cli.options.output import Output
    from lade.cli.serve.model import load
    from lade.cli.terminal import Terminal

    served = load(loading, speed, chat_template, Terminal(Output(quiet=True)))
    return replace(served, save=None, close=_nothing)


def _nothing() -> None:
    """What a replica leaves behind."""
