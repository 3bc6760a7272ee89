"""The package version, and a warning when the original `lade` distribution shares this package's folder."""

from __future__ import annotations

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
