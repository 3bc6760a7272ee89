"""A griffe extension: examples of docstrings, which no heading announces, become code blocks of the site.

Markdown reads `>>>` as three nested quotations and joins the lines. `make docs` loads this file by mkdocs.yml.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*\n|\s*$).*)*", re.MULTILINE)


def fenced(text: str) -> str:
    """Return a docstring with each paragraph that begins with `>>> ` in a fenced block."""
    return _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", text)


class Examples(griffe.Extension):
    """Rewrites the docstring of each object as it is collected."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Put the examples of one object into code blocks."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
