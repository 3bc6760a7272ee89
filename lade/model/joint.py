"""The table of backends, through which the core loads them.

A backend serves a feature beyond an ordinary decoder on one device. The core imports none of them: it checks the facts
about a model (`ModelFacts`) for whether one is needed, and loads it then. A call that needs none imports none.

    name             serves                                                      needed if
    trials           models that the tests do not cover: trial passes decide     foreign code or layers, training mode
    adapters         PEFT's adapters                                             PEFT is imported
    user_cache       a user's own KV cache                                       one is given
    slots            layers that compute with cache slots, not with positions    `facts.uses_slots`
    recurrent        linear attention, state space models, short convolutions    `facts.recurrent_functions`
    encoder_decoder  token trees in a decoder behind an encoder                  `facts.has_encoder`
    media            prompts with images, video or audio                         a prompt has such inputs
    grammar          structured output, by llguidance                            a `lade.Grammar` is used
    cpu              packed linear layers, batch-invariant models                the model has such layers
    tree_attention   `attn_implementation="lade_tree"`                           the config names it
    cuda_graphs      forward passes captured as CUDA graphs                      the model is on a CUDA device
    mtp              drafts by the multi-token prediction layers of a checkpoint  its configuration has such layers
    processes        several processes that decode together                      the model is split, or `lade.parallel`
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

_HOME = "lade.backends"
BACKENDS = (
    "trials",
    "adapters",
    "user_cache",
    "slots",
    "recurrent",
    "encoder_decoder",
    "media",
    "grammar",
    "cpu",
    "tree_attention",
    "cuda_graphs",
    "mtp",
    "processes",
)
_SINGLE_FILES = frozenset({"adapters", "user_cache", "slots", "media"})


def load(name: str) -> Any:
    """Import a backend and return it: `BACKEND` of `lade/backends/NAME.py`, or of `lade/backends/NAME/backend.py`."""
    return import_module(f"{_HOME}.{name}" if name in _SINGLE_FILES else f"{_HOME}.{name}.backend").BACKEND


def loaded(name: str) -> Any | None:
    """Return a backend if it is imported; else None, as then no model can use it."""
    return load(name) if f"{_HOME}.{name}" in sys.modules else None
