"""`lade.Memory`: a context memory kept across generations, and its file format.

A safetensors file:

    metadata   format, version, layout (parameters of the encoding), library, max_bytes, tokenizer, sha256
    old        int32 [n, 2 + WIDTH]  contexts not used recently: two halves of a hash, and a row of entries each
    young      int32 [m, 2 + WIDTH]  contexts used recently
    weights    float64 [WEIGHT_SETS, END + 1]  weights of the mixer

See `lade.decoding.kernels` for hashes and entries. The checksum is the SHA-256 of the file with the checksum's own
digits set to zero, so that no byte can change unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors import numpy as container

from lade.decoding.drafting.memory import DEFAULT_BYTES, KINDS, LEAST_BYTES, ContextMemory, Snapshot
from lade.decoding.kernels.layout import BITS, CEILING, END, FLOOR, ORDERS, TEXT_ORDERS, TOKEN, WEIGHT_SETS, WIDTH
from lade.errors import InputError
from lade.files import write_whole
from lade.version import __version__

FORMAT = "lade.memory"
VERSION = 2
REMEDY = "fill a new one with lade warm"

Arrays = Mapping[str, npt.NDArray[Any]]

_HASH = "chained multiplication, 1"  # change it whenever the kernels' hash of a context changes
_LAYOUT = json.dumps(
    {"orders": ORDERS, "text": TEXT_ORDERS, "width": WIDTH, "log_odds": [FLOOR, CEILING], "hash": _HASH}
)
_UNKNOWN = b"0" * 64
_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')


def fingerprint_of(tokenizer: Any) -> str:
    """Return the SHA-256 of a tokenizer's `get_vocab()`, in hexadecimal: equal if the same ids mean the same tokens."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def _agreed_fingerprint(path: str | os.PathLike[str], relation: str, known: str | None, tokenizer: Any) -> str | None:
    """Return the fingerprint of a tokenizer, or without one that which is known; raise `InputError` if they differ."""
    if tokenizer is None:
        return known
    given = fingerprint_of(tokenizer)
    if known is not None and known != given:
        raise InputError(
            f"{_named(path)} {relation} the tokenizer {known[:8]}, and the tokenizer given is {given[:8]}: "
            f"give the tokenizer that the memory was filled with, or {REMEDY}"
        )
    return given


def check(path: str | os.PathLike[str]) -> None:
    """Raise `InputError` if `Memory.save` would fail, as far as that can be known beforehand."""
    with _writing(path) as target, tempfile.NamedTemporaryFile(dir=target.parent, prefix=f"{target.name}."):
        pass  # the permissions of its folder alone do not always tell


@contextmanager
def _writing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Translate errors of writing to a memory file into `InputError`, with a remedy."""
    try:
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            raise InputError(f"{_named(path)} cannot be written: it is not a regular file; give the name of a file")
        yield target
    except (OSError, ValueError) as problem:
        if isinstance(problem, InputError):
            raise
        raise _failed(path, "written", problem, "check folder, permissions and free space") from problem


def _failed(path: str | os.PathLike[str], what: str, problem: Exception, remedy: str) -> InputError:
    """Return the error of a file that cannot be opened; a `ValueError` is of a name with a NUL or a lone surrogate."""
    if isinstance(problem, ValueError):
        return InputError(f"{_named(path)} cannot be {what}: its name is not valid ({problem}); give another one")
    return InputError(f"{_named(path)} cannot be {what}: {getattr(problem, 'strerror', None) or problem}; {remedy}")


def _read(path: str | os.PathLike[str], tokenizer: Any) -> tuple[Snapshot, str | None]:
    """Read a memory file and validate all of it; return contents and the fingerprint of their tokenizer, if known."""
    try:
        whole = Path(path).read_bytes()
    except (OSError, ValueError) as problem:
        raise _failed(path, "read", problem, f"check path and permissions, or {REMEDY}") from problem
    try:
        metadata = _checked_metadata(whole)
        snapshot = _snapshot(metadata, container.load(whole))
    except (_InvalidFileError, SafetensorError, KeyError) as problem:  # KeyError: a dtype that numpy does not have
        reason = problem.args[0] if isinstance(problem, _InvalidFileError) else f"is damaged ({problem})"
        raise InputError(f"{_named(path)} {reason}; {REMEDY}") from problem
    known = metadata.get("tokenizer")
    if known is None and tokenizer is not None:
        _check_ids(path, snapshot, len(tokenizer))
    return snapshot, _agreed_fingerprint(path, "is of", known, tokenizer)


class _InvalidFileError(Exception):
    """The defect of a file, as the predicate of a sentence."""


def _named(path: str | os.PathLike[str]) -> str:
    return f"memory file {os.fspath(path)!r}"


def _check_ids(path: str | os.PathLike[str], snapshot: Snapshot, vocabulary: int) -> None:
    """Raise `InputError` unless all ids of a memory of an unknown tokenizer are below a size."""
    ids = np.concatenate([snapshot.old, snapshot.young])[:, 2:] & TOKEN
    largest = int(ids[ids != TOKEN].max(initial=-1))
    if largest >= vocabulary:
        raise InputError(
            f"{_named(path)} has the id {largest}, and the tokenizer given has only {vocabulary}: "
            f"give the tokenizer that the memory was filled with, or {REMEDY}"
        )


def _metadata(max_bytes: int, fingerprint: str | None) -> dict[str, str]:
    facts = {
        "format": FORMAT,
        "version": str(VERSION),
        "layout": _LAYOUT,
        "library": __version__,
        "max_bytes": str(max_bytes),
        "sha256": _UNKNOWN.decode(),
    }
    return facts if fingerprint is None else {**facts, "tokenizer": fingerprint}


def _checked_metadata(whole: bytes) -> dict[str, str]:
    """Return the metadata, if format, version, checksum and layout are right."""
    end = 8 + int.from_bytes(whole[:8], "little")
    try:
        header = json.loads(whole[8:end])
    except (ValueError, RecursionError) as problem:
        raise _InvalidFileError("is damaged or not a memory file: its header cannot be read") from problem
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise _InvalidFileError(f"is not a memory file: the format in its header is not {FORMAT}")
    if metadata.get("version") != str(VERSION):
        raise _InvalidFileError(
            f"has version {metadata.get('version')} of the format, and lade {__version__} reads version {VERSION}: "
            "use the lade that wrote it"
        )
    place = _CHECKSUM.search(whole, 8, end)
    if place is None or _checksum(whole, place) != place[1]:
        raise _InvalidFileError("is damaged: its checksum is wrong")
    if metadata.get("layout") != _LAYOUT:
        raise _InvalidFileError(f"has the layout {metadata.get('layout')}, and lade {__version__} reads {_LAYOUT}")
    return metadata


def _checksum(whole: bytes, place: re.Match[bytes]) -> bytes:
    view, digest = memoryview(whole), hashlib.sha256()
    for part in (view[: place.start(1)], _UNKNOWN, view[place.end(1) :]):
        digest.update(part)
    return digest.hexdigest().encode()


def _check_arrays(arrays: Arrays) -> None:
    """Check dtypes, shapes and values of the tensors."""
    for name in ("old", "young"):
        slots = _checked(arrays, name, np.int32, None, 2 + WIDTH)
        kinds = slots[:, 0] & KINDS
        if not ((kinds >= 1) & (kinds <= END)).all():
            raise _InvalidFileError(f"is damaged: {name} has an invalid key")
        if (slots[:, 2:] < 0).any() or (slots[:, 2:] >> BITS > 255).any():
            raise _InvalidFileError(f"is damaged: {name} has an invalid entry")
        if len(np.unique(slots[:, :2], axis=0)) < len(slots):
            raise _InvalidFileError(f"is damaged: {name} has a key twice")
    if not np.isfinite(_checked(arrays, "weights", np.float64, WEIGHT_SETS, END + 1)).all():
        raise _InvalidFileError("is damaged: weights are not finite")


def _checked(arrays: Arrays, name: str, dtype: npt.DTypeLike, *shape: int | None) -> npt.NDArray[Any]:
    """Return the named tensor if it has this dtype and shape; None in the shape stands for any length."""
    array = arrays.get(name)
    if array is None:
        raise _InvalidFileError(f"is damaged: it lacks {name}")
    fits = array.ndim == len(shape) and all(want in (None, size) for want, size in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits:
        wanted = ["n" if size is None else size for size in shape]
        raise _InvalidFileError(
            f"is damaged: {name} is {array.dtype} {list(array.shape)}, not {np.dtype(dtype)} {wanted}"
        )
    return array


def _snapshot(metadata: Mapping[str, str], arrays: Arrays) -> Snapshot:
    _check_arrays(arrays)
    try:
        max_bytes = int(metadata["max_bytes"])
    except (KeyError, ValueError) as problem:
        raise _InvalidFileError(f"is damaged: its metadata are incomplete ({problem})") from problem
    if max_bytes < LEAST_BYTES:
        raise _InvalidFileError(f"is damaged: max_bytes={max_bytes} is less than {LEAST_BYTES}")
    return Snapshot(arrays["old"], arrays["young"], arrays["weights"], max_bytes)


class Memory(ContextMemory):
    """Next-token statistics by context, kept across generations; the least recently used contexts are evicted first.

    By default each generation has a memory of its own. Pass one to keep it across generations:

    >>> memory = lade.Memory()
    >>> config = lade.LookaheadConfig(memory=memory)
    >>> lade.generate(model, input_ids=ids, lookahead=config)

    Similar texts are then generated faster. Timing is a side channel: a user could find out which texts another user's
    requests contained. Share a memory only between users who may know each other's texts. It is thread-safe.

    Args:
        max_bytes: memory limit. A context takes about 50 bytes.

    Attributes:
        fingerprint: fingerprint of the tokenizer that the memory was loaded or saved with; None if there was none.

    Raises:
        ConfigError: `max_bytes` is not a whole number, or too small.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        super().__init__(max_bytes)
        self.fingerprint: str | None = None

    def save(self, path: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Save the memory to a file, atomically. Other threads may keep learning meanwhile.

        A new file is readable by its owner alone, as its content reveals texts. A replaced one keeps its permissions.

        >>> memory.save("stories.memory", tokenizer)
        >>> memory = lade.Memory.load("stories.memory", tokenizer)

        Args:
            path: the file to write; its folder must exist.
            tokenizer: tokenizer of the model that filled the memory; the file is bound to its vocabulary. None for the
                tokenizer that the memory was loaded or saved with before, if any.

        Raises:
            InputError: the file cannot be written, or the memory belongs to another tokenizer.
        """
        fingerprint = _agreed_fingerprint(path, "is to hold a memory of", self.fingerprint, tokenizer)
        snapshot = self.snapshot()
        tensors: Arrays = {"old": snapshot.old, "young": snapshot.young, "weights": snapshot.weights}
        whole = container.save(dict(tensors), _metadata(snapshot.max_bytes, fingerprint))
        place = _CHECKSUM.search(whole)
        assert place is not None, "the metadata has it"
        whole = b"".join([whole[: place.start(1)], _checksum(whole, place), whole[place.end(1) :]])
        with _writing(path) as target:
            write_whole(target, whole, durable=True)
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer: Any = None, *, max_bytes: int | None = None) -> Self:
        """Load a memory from a file.

        Args:
            path: the file to read.
            tokenizer: tokenizer of the model that is to use the memory; None skips the check that the file matches it.
            max_bytes: memory limit, see `Memory`; None for the saved one. A lower limit evicts longer contexts first,
                both among the recently used and among the others.

        Raises:
            InputError: the file cannot be read, is damaged, or belongs to another tokenizer.
            ConfigError: `max_bytes` is not a whole number, or too small.
        """
        snapshot, fingerprint = _read(path, tokenizer)
        memory = cls.of(snapshot, max_bytes)
        memory.fingerprint = fingerprint
        return memory
