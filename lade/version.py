"""The package version, and checks of the installation when the package is imported."""

from __future__ import annotations

import logging
import platform
import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version

from lade.announcements import announce_once

__version__ = "0.1.0"
TESTED_TRANSFORMERS = (5, 24)
"""The newest minor version of transformers that `make test-newest` has passed on."""

logger = logging.getLogger(__name__)

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


def versions() -> dict[str, str]:
    """Return the versions of the libraries that answers depend on, and Python's."""
    return {"torch": version("torch"), "transformers": version("transformers"), "python": platform.python_version()}


def minor_version(installed: str) -> tuple[int, int]:
    """Return the first two numbers of a version, such as (5, 24); zeros if it does not begin with them."""
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def note_untested_version(installed: str) -> None:
    """Say once if transformers is newer than all that was tested; a renamed argument may end all acceleration."""
    tested = ".".join(map(str, TESTED_TRANSFORMERS))
    if minor_version(installed) > TESTED_TRANSFORMERS:
        announce_once(
            logger,
            f"transformers {installed} is newer than {tested}, the newest that lade {__version__} was tested with: "
            "lade.supports(model) tries what it does not know, and Stats tells whether there are fewer passes",
            logging.WARNING,
        )


def refuse_free_threading() -> None:
    """Raise `ImportError` if the interpreter runs without its lock, which guards tables that threads share."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise ImportError(
            "lade does not support free-threaded Python: use the ordinary build, or start Python with -X gil=1"
        )
