"""The version, and a warning if the original library shares the folder `lade`."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

__version__ = "0.1.0"


REMEDY = "pip uninstall lade && pip install --force-reinstall --no-deps lookahead-decoding"


def warn_of_the_old_library() -> None:
    """Warn if the distribution `lade` is installed beside `lookahead-decoding`: they share the folder `lade`."""
    try:
        old = version("lade")
    except PackageNotFoundError:
        return
    warnings.warn(
        f"the original library lade {old} is installed beside lookahead-decoding and shares its folder: run  {REMEDY}",
        stacklevel=3,
    )
