"""Which text the embedded model is trained on, and which it never sees.

The corpus is the Python standard library of the running interpreter, file by file in sorted order. Some modules
are held out, with their tests, to measure the model on text it has not read. Question/answer files can be added
by path. Nothing here knows about tokens.
"""

from __future__ import annotations

import json
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lade.errors import InputError
from training.cleaning import clean, is_prose_or_code

HELD_OUT = ("bisect", "colorsys", "difflib", "fnmatch", "heapq", "shlex", "statistics", "textwrap")

# Data in the shape of code, fixtures that are broken on purpose, and programs with a bundled site of their own.
_SKIPPED_DIRECTORIES = frozenset({
    "site-packages", "dist-packages", "__pycache__", "encodings", "ensurepip", "idlelib", "lib-dynload", "lib2to3",
    "pydoc_data", "turtledemo", "encoded_modules", "test_lib2to3", "test_idle", "crashers", "cjkencodings", "data",
})  # fmt: skip
_SKIPPED_PREFIXES = ("bad", "test_codecencodings", "test_codecmaps", "test_unicode", "config-")
_SEEN_SHARE = 0.6  # a file with more of its lines in earlier files is a copy
_LIBRARY_REPEATS = 3  # the library is better prose than its tests: it is read three times where they are read once


@dataclass(frozen=True)
class Document:
    """One text of the corpus: where it comes from, what it says, how often an epoch reads it."""

    name: str
    text: str
    repeats: int = 1


def standard_library() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def training_documents(root: Path) -> list[Document]:
    """Return the cleaned files below `root` that the model is trained on, in sorted order, copies dropped.

    Raises InputError if there is not one.
    """
    documents = _without_copies(d for d in _documents(root) if not is_held_out(d.name))
    if not documents:
        raise InputError(f"corpus root {root}: no Python source to read there; name a standard library folder")
    return documents


def held_out_documents(root: Path, *, tests: bool = False) -> list[Document]:
    """Return the held-out modules below `root`, or with `tests` the tests of those modules."""
    return [d for d in _documents(root) if is_held_out(d.name) and d.name.startswith("test/") == tests]


def is_held_out(name: str) -> bool:
    """Say whether the file `name` (posix path below the root) is a held-out module or one of its tests.

    >>> is_held_out("heapq.py"), is_held_out("test/test_heapq.py"), is_held_out("queue.py")
    (True, True, False)
    """
    return Path(name).stem.removeprefix("test_") in HELD_OUT


def question_documents(path: Path) -> list[Document]:
    """Return one document per line of a JSONL file whose objects have `question` and `answer`.

    Raises InputError if the file cannot be read or a line is something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"questions file {path}: cannot be read ({error}); name a UTF-8 JSONL file") from error
    return [_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _question(path: Path, number: int, line: str) -> Document:
    try:
        item = json.loads(line)
        text = f"Question: {item['question']}\nAnswer: {item['answer']}\n"
    except (ValueError, KeyError, TypeError) as error:
        remedy = 'each line must be an object with "question" and "answer"'
        raise InputError(f"questions file {path}, line {number}: {line[:40]!r}; {remedy}") from error
    return Document(f"{path.name}:{number}", text)


def _documents(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not _is_skipped(relative):
            text = _read(path)
            if is_prose_or_code(text):
                repeats = 1 if _is_test(relative) else _LIBRARY_REPEATS
                yield Document(relative.as_posix(), text, repeats)


def _is_skipped(relative: Path) -> bool:
    if _SKIPPED_DIRECTORIES.intersection(relative.parts[:-1]):
        return True
    return any(part.startswith(_SKIPPED_PREFIXES) for part in relative.parts)


def _is_test(relative: Path) -> bool:
    return any(part in ("test", "tests") for part in relative.parts)


def _read(path: Path) -> str:
    """Return the cleaned text of a source file, or nothing if its encoding is not what it declares."""
    try:
        with tokenize.open(path) as file:
            return clean(file.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


def _without_copies(documents: Iterator[Document]) -> list[Document]:
    """Keep a document only if most of its longer lines did not occur in the ones kept before it."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        lines = {s for line in document.text.splitlines() if len(s := line.strip()) > 20}
        if len(lines & seen) <= _SEEN_SHARE * len(lines):
            seen |= lines
            kept.append(document)
    return kept
