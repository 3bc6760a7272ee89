"""Where the embedded model lies, and beginnings of functions that it continues."""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def model_path() -> Path:
    """Return the folder of the embedded model, for `from_pretrained`."""
    return Path(str(resources.files("lade.demo") / "model"))


def prompts() -> list[str]:
    """Return beginnings of Python functions, each without its last line end.

    Chosen because their greedy continuation by the embedded model does not fall into a loop: repetition
    flatters every method that proposes text seen before.
    """
    return list(_PROMPTS)


_PROMPTS = (
    '''def read_settings(path, encoding="utf-8"):
    """Read a settings file and return its sections as a dictionary."""
    with open(path, encoding=encoding) as file:''',
)
