"""What transformers and the hub write on the terminal while a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils import logging as _logging

from lade.cli.terminal import Terminal

_SILENT = 50  # logging.CRITICAL


@contextmanager
def downloading(term: Terminal) -> Iterator[None]:
    """The hub's bars show how far a download is, and transformers' how far loading; no line of ours among them."""
    logging: Any = _logging  # untyped
    term.pausing(True)
    logging.enable_progress_bar()
    try:
        yield
    finally:
        logging.disable_progress_bar()
        term.pausing(False)


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers' progress bars and advice are switched off, and afterwards are as they were."""
    logging: Any = _logging  # untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(_SILENT)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
