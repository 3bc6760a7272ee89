"""Lookahead decoding for any Hugging Face causal language model: fewer forward passes, the same tokens.

>>> import lade
>>> lade.enable(model)
>>> model.generate(**inputs)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lade.errors import (
    CaptureWarning,
    ClusterError,
    ConfigError,
    DrafterError,
    EngineClosedError,
    EngineFullError,
    FallbackWarning,
    InputError,
    LadeError,
    MissingExtraError,
    PrecisionWarning,
    UnsupportedArgumentError,
    UnsupportedError,
    UnsupportedModelError,
)
from lade.version import __version__, refuse_free_threading, warn_if_shadowed

if TYPE_CHECKING:
    import lade_lab as bench
    from lade import peers
    from lade.backends.cpu.invariant.make_invariant import invariant, variant
    from lade.backends.cpu.packing.folder import load_packed, save_packed
    from lade.backends.cpu.packing.gguf_model import load_gguf
    from lade.backends.cpu.packing.pack import pack, unpack
    from lade.backends.cuda_graphs.backend import release
    from lade.backends.processes.team import parallel
    from lade.config import LookaheadConfig
    from lade.drafter import Continuation, Drafter
    from lade.engines.drafter import EngineDraft, EngineDrafter
    from lade.grammar import Grammar
    from lade.hf.detokenizer import Detokenizer
    from lade.hf.distributed import follow
    from lade.hf.enable import disable, enable
    from lade.hf.generate import decode, decoder, generate, stream
    from lade.hf.legacy_api import augment_all, config_lade, log_history, restore_all, save_log
    from lade.memory import Memory
    from lade.model.kv_cache import TreeCache
    from lade.model.supports import Support, supports
    from lade.serving.engine import Engine
    from lade.serving.handle import Handle
    from lade.stats import Stats, Step

__all__ = [
    "CaptureWarning",
    "ClusterError",
    "ConfigError",
    "Continuation",
    "Detokenizer",
    "Drafter",
    "DrafterError",
    "Engine",
    "EngineClosedError",
    "EngineDraft",
    "EngineDrafter",
    "EngineFullError",
    "FallbackWarning",
    "Grammar",
    "Handle",
    "InputError",
    "LadeError",
    "LookaheadConfig",
    "Memory",
    "MissingExtraError",
    "PrecisionWarning",
    "Stats",
    "Step",
    "Support",
    "TreeCache",
    "UnsupportedArgumentError",
    "UnsupportedError",
    "UnsupportedModelError",
    "__version__",
    "augment_all",
    "bench",
    "config_lade",
    "decode",
    "decoder",
    "disable",
    "enable",
    "follow",
    "generate",
    "invariant",
    "load_gguf",
    "load_packed",
    "log_history",
    "pack",
    "parallel",
    "peers",
    "release",
    "restore_all",
    "save_log",
    "save_packed",
    "stream",
    "supports",
    "unpack",
    "variant",
]

_HOMES = {
    "lade.backends.processes.team": ("parallel",),
    "lade.config": ("LookaheadConfig",),
    "lade.drafter": ("Continuation", "Drafter"),
    "lade.memory": ("Memory",),
    "lade.engines.drafter": ("EngineDraft", "EngineDrafter"),
    "lade.hf.legacy_api": ("augment_all", "config_lade", "log_history", "restore_all", "save_log"),
    "lade.hf.enable": ("disable", "enable"),
    "lade.hf.detokenizer": ("Detokenizer",),
    "lade.hf.distributed": ("follow",),
    "lade.hf.generate": ("decode", "decoder", "generate", "stream"),
    "lade.grammar": ("Grammar",),
    "lade.backends.cpu.invariant.make_invariant": ("invariant", "variant"),
    "lade.model.kv_cache": ("TreeCache",),
    "lade.backends.cpu.packing.folder": ("load_packed", "save_packed"),
    "lade.backends.cpu.packing.pack": ("pack", "unpack"),
    "lade.backends.cpu.packing.gguf_model": ("load_gguf",),
    "lade.model.supports": ("Support", "supports"),
    "lade.backends.cuda_graphs.backend": ("release",),
    "lade.serving.engine": ("Engine",),
    "lade.serving.handle": ("Handle",),
    "lade.stats": ("Stats", "Step"),
}
_MODULES = {"bench": "lade_lab", "peers": "lade.peers"}
"""Public modules by their names in this one."""
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name on first access, so that `lade --help` need not wait for torch."""
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_HOME_OF[name]), name)
        return value


def __dir__() -> list[str]:
    return list(__all__)


refuse_free_threading()
warn_if_shadowed()
