"""The package version, and checks of the installation when the package is imported."""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


REMEDY = "pip uninstall lade && pip install --force-reinstall --no-deps ."


def warn_if_shadowed() -> None:
    """Warn if the original distribution `lade` is installed too: it writes to the same folder as this package."""
    try:
        old = version("lade")
    except PackageNotFoundError:
        return
    warnings.warn(
        f"the original library lade {old} is installed beside lookahead-decoding and shares its folder: "
        f"in the checkout of lookahead-decoding, run  {REMEDY}",
        stacklevel=3,
    )


def refuse_free_threading() -> None:
    """Raise `ImportError` if the interpreter runs without its lock, which guards tables that threads share."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise ImportError(
            "lade does not support free-threaded Python: use the ordinary build, or start Python with -X gil=1"
        )
