"""Where the embedded model lies, and beginnings of functions that it continues."""

from __future__ import annotations

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
    return list(_PROMPTS)


_PROMPTS = (
    '''def read_settings(path, encoding="utf-8"):
    """Read a settings file and return its sections as a dictionary."""
    with open(path, encoding=encoding) as file:''',
    '''"""Tools for files and text."""

import os
import re


def find_files(root, pattern, recursive=True):
    """Yield the path of every file below root whose name matches the pattern."""
    for entry in os.scandir(root):''',
    '''def decode_line(line, charset="ascii"):
    """Decode one line of a message.

    Bytes that are not in the character set are replaced.
    """
    if isinstance(line, str):
        return line
    try:''',
    '''def remove_directory(path, ignore_errors=False):
    """Delete a directory and everything that is in it."""
    try:
        entries = os.listdir(path)
    except OSError''',
    '''"""Tools for files and text."""

import os
import re


def split_path(path):
    """Split a path into a directory and a file name.

    Return a pair of strings; either of them may be empty.
    """
    index = path.rfind(os.sep)''',
    '''import sys
import time


def read_until(stream, delimiter, limit=1024):
    """Read from the stream until the delimiter is found.

    Return the data read so far, without the delimiter.
    """
    data = b""
    while not data.endswith(delimiter):''',
)
