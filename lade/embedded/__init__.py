"""The embedded demonstration model: where it lies, and beginnings of functions that it continues."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path


def model_path() -> Path:
    """Return the folder of the embedded model, for `from_pretrained`."""
    return Path(str(resources.files("lade.embedded") / "model"))


def prompts() -> list[str]:
    """Return beginnings of Python functions, each without its last line end.

    Chosen because their greedy continuation by the embedded model does not fall into a loop: repetition
    flatters every method that proposes text seen before.
    """
    text = (resources.files("lade.embedded") / "prompts.json").read_text(encoding="utf-8")
    found: list[str] = json.loads(text)
    return found
