"""Normalisation of source files for a small model.

A model of a few million parameters learns whatever is frequent. Licence headers and tables of constants are
frequent and teach it to recite, so they go; everything that reads like code stays as it was written.
"""

from __future__ import annotations

import re
import zlib

_LICENCE = re.compile(r"copyright|licen[sc]e|all rights reserved", re.IGNORECASE)
# A line of a table: nothing but literals, names of constants and brackets, closed by a comma.
_TABLE_LINE = re.compile(
    r"""^\s*[\[({]*\s*(?:[rbuRBU]{0,2}["'].*["']|-?[\d.][\w.+-]*)[\])},:\s\w"'.-]*,?\s*(?:#.*)?$"""
)
_TABLE_KEPT_LINES = 6
_MOST_REPETITIVE = 7.5  # bytes in / bytes out of zlib; ordinary modules lie between 3 and 5


def clean(text: str) -> str:
    r"""Return `text` with unix line ends, spaces for tabs, no licence header, and long tables cut short.

    >>> clean("# Copyright 1999\n# by nobody\n\nx = 1  \r\n")
    'x = 1\n'
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n").lstrip("\ufeff")
    lines = [line.expandtabs(8).rstrip() for line in text.split("\n")]
    lines = _without_table_tails(_without_licence(lines))
    return re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)).strip("\n") + "\n"


def is_prose_or_code(text: str) -> bool:
    """Say whether `text` is worth reading: long enough, mostly ASCII, and not one pattern again and again."""
    data = text.encode("utf-8")
    if len(data) < 200 or len(data) - len(text) > len(data) // 50:
        return False
    return len(data) / len(zlib.compress(data, 6)) <= _MOST_REPETITIVE


def _without_licence(lines: list[str]) -> list[str]:
    """Drop the leading comment lines if any of them speaks of copyright or licence."""
    end = 0
    while end < len(lines) and (not lines[end] or lines[end].startswith("#")):
        end += 1
    return lines[end:] if _LICENCE.search("\n".join(lines[:end])) else lines


def _without_table_tails(lines: list[str]) -> list[str]:
    """Keep the first lines of each run of table lines and drop the rest of the run."""
    kept: list[str] = []
    run = 0
    for line in lines:
        run = run + 1 if _TABLE_LINE.match(line) else 0
        if run <= _TABLE_KEPT_LINES:
            kept.append(line)
    return kept
