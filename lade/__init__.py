"""Lookahead decoding for any Hugging Face causal language model: fewer forward passes, the same tokens.

>>> import lade
>>> model.generate(**inputs, custom_generate=lade.decode)
"""

from lade.config import LookaheadConfig
from lade.errors import (
    ConfigError,
    FallbackWarning,
    InputError,
    LadeError,
    MissingExtraError,
    UnsupportedArgumentError,
    UnsupportedModelError,
)
from lade.hf.compat import augment_all, config_lade, log_history, restore_all, save_log
from lade.hf.generate import decode, decoder, generate, stream
from lade.model.cache import TreeCache
from lade.model.support import Support, supports
from lade.stats import Stats, Step
from lade.version import __version__


__all__ = [
    "ConfigError",
    "FallbackWarning",
    "InputError",
    "LadeError",
    "LookaheadConfig",
    "MissingExtraError",
    "Stats",
    "Step",
    "Support",
    "TreeCache",
    "UnsupportedArgumentError",
    "UnsupportedModelError",
    "__version__",
    "augment_all",
    "config_lade",
    "decode",
    "decoder",
    "generate",
    "log_history",
    "restore_all",
    "save_log",
    "stream",
    "supports",
]
