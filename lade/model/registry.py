"""Roles that backends play, through which the core reaches them: it imports none of them, and names none.

A module that needs more than an ordinary decoder on one device declares what it needs as a `Protocol`, and a `Role` of
that type. The table below says which module plays it. That module is imported when it is first asked for, and fills the
role with an object that type checkers compare with the protocol. A call that needs no backend imports none.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Generic, TypeVar

T = TypeVar("T")

_HOME = "lade.backends"
PLAYED_BY = {
    "adapters": "adapters",  # needed if PEFT is imported
    "user caches": "user_cache",  # a caller gives a cache, or gets one
    "layers that use slots": "slots",  # `facts.uses_slots`
    "media": "media",  # a prompt has images, video or audio
    "recurrent layers": "recurrent.backend",  # `facts.recurrent_functions`
    "encoders": "encoder_decoder",  # `facts.has_encoder`
    "encoded runners": "encoder_decoder",
    "grammars": "grammar.backend",  # a `lade.Grammar` is used
    "packed layers": "cpu.backend",  # the model has such layers
    "placed masks": "cpu.backend",  # the model is batch-invariant
    "invariant models": "cpu.backend",
    "tree masks": "tree_attention.backend",  # `attn_implementation="lade_tree"`
    "captured passes": "cuda_graphs.backend",  # the model is on a CUDA device
    "fused passes": "cuda_graphs.backend",
    "invariance on GPUs": "cuda_graphs.backend",
    "MTP files": "mtp.backend",  # the checkpoint's configuration has such layers
    "MTP layers": "mtp.backend",
    "passes of several processes": "processes.backend",  # the model is split, or given to `lade.parallel`
    "split models": "processes.backend",
    "trials": "trials.backend",  # the tests do not cover the model: foreign code or layers, training mode
}
"""The table of backends: a role, the module that plays it, and when it is needed."""


class Role(Generic[T]):
    """One thing that the core needs a backend for, by its name in `PLAYED_BY`.

    Example:
        MEDIA: Role[Media] = Role("media")
        MEDIA.load().prompts(prepared, texts)
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._module = f"{_HOME}.{PLAYED_BY[name]}"
        self._player: T | None = None

    def fill(self, player: T) -> None:
        """Say who plays the role; called by the module that the table has for it."""
        self._player = player

    def load(self) -> T:
        """Return who plays the role, imported now if it never was."""
        if self._player is None:
            import_module(self._module)
        assert self._player is not None, f"{self._module} does not fill its role"
        return self._player

    def loaded(self) -> T | None:
        """Return who plays the role if any part of it is imported; else None, as then no model can need it."""
        return self.load() if self._module.removesuffix(".backend") in sys.modules else None
