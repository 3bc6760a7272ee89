"""`lade.Memory`: the context memory, kept across generations, and its file format.

    metadata   format, version, layout (what the numbers mean), library, max_bytes, tokenizer, sha256
    old        int32 [n, 2 + WIDTH]  contexts that have not come up lately: the two halves of a hash, and a row each
    young      int32 [m, 2 + WIDTH]  those that have
    weights    float64 [LINES, END + 1]  the mixer's

See `kernels` for hashes and rows. The checksum is the SHA-256 of the file as it was when the checksum's own digits were
zeros. So not one byte can change unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors import numpy as container

from lade.decoding.drafting.memory import DEFAULT_BYTES, KINDS, LEAST_BYTES, ContextMemory, Snapshot
from lade.decoding.kernels.layout import BITS, CEILING, END, FLOOR, LINES, ORDERS, TEXT_ORDERS, TOKEN, WIDTH, Ints
from lade.errors import InputError
from lade.files import check_writable, write_whole
from lade.version import __version__

FORMAT = "lade.memory"
VERSION = 2
REMEDY = "fill a new one with lade warm"

Arrays = Mapping[str, npt.NDArray[Any]]

_HASH = "chained multiplication, 1"  # to be changed with `kernels`, where contexts would get other keys
_LAYOUT = json.dumps(
    {"orders": ORDERS, "text": TEXT_ORDERS, "width": WIDTH, "log_odds": [FLOOR, CEILING], "hash": _HASH}
)
_UNKNOWN = b"0" * 64
_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')


def fingerprint_of(tokenizer: Any) -> str:
    """The SHA-256 of a tokenizer's vocabulary, in hexadecimal: equal if the same ids mean the same tokens.

    Args:
        tokenizer: anything with `get_vocab()`, a mapping from token to id.
    """
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def agreed(path: str | os.PathLike[str], known: str | None, tokenizer: Any) -> str | None:
    """The fingerprint under which a memory is to be saved.

    Args:
        path: where to; for the message.
        known: fingerprint of the tokenizer that the memory has been loaded or saved with; None if there was none.
        tokenizer: the one that it is to be saved with; None: as before.

    Raises:
        InputError: they differ.
    """
    if tokenizer is None:
        return known
    given = fingerprint_of(tokenizer)
    if known not in (None, given):
        raise _foreign(path, f"is to hold a memory of the tokenizer {_short(known)}", given)
    return given


def write(path: str | os.PathLike[str], snapshot: Snapshot, fingerprint: str | None) -> None:
    """Write a file; a reader meanwhile, or after a failure, finds the old one whole.

    Only its owner may read a new file, since it tells of texts. The permissions of a file that was there stay.

    Args:
        path: the file.
        snapshot: contents of the memory.
        fingerprint: names the tokenizer that the tokens are of; None if it is not known.

    Raises:
        InputError: it cannot be written.
    """
    tensors: dict[str, npt.NDArray[Any]] = {"old": snapshot.old, "young": snapshot.young, "weights": snapshot.weights}
    whole = _sealed(container.save(tensors, _metadata(snapshot.max_bytes, fingerprint)))
    with _writing(path) as target:
        write_whole(target, whole, durable=True)


def check(path: str | os.PathLike[str]) -> None:
    """Raise `InputError` where `write` would, as far as that can be known before there is anything to write."""
    with _writing(path) as target:
        check_writable(target)


@contextmanager
def _writing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A block that writes a file; what keeps it from that is said with its remedy."""
    _check_name(path, "written")
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            raise InputError(f"{_named(path)} cannot be written: it is no regular file; give the name of a file")
        yield target
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(
            f"{_named(path)} cannot be written: {reason}; check folder, permissions and free space"
        ) from problem


def _check_name(path: str | os.PathLike[str], what: str) -> None:
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        raise InputError(f"{_named(path)} cannot be {what}: half a character is no name; give another one") from None
    if b"\0" in name:
        raise InputError(f"{_named(path)} cannot be {what}: there is a NUL in its name; give another one")


def read(path: str | os.PathLike[str], tokenizer: Any = None) -> tuple[Snapshot, str | None]:
    """Read a file, and believe none of it unchecked.

    Args:
        path: the file.
        tokenizer: the one it is to be used with; None: it is not checked whether it is of the same one.

    Returns:
        The memory's contents, and the fingerprint of their tokenizer; None if it is not known.

    Raises:
        InputError: it cannot be read, is damaged or something else, or is of another tokenizer.
    """
    _check_name(path, "read")
    try:
        whole = Path(path).read_bytes()
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(
            f"{_named(path)} cannot be read: {reason}; check path and permissions, or {REMEDY}"
        ) from problem
    try:
        metadata = _checked_metadata(whole)
        arrays = _checked_arrays(container.load(whole))
        snapshot = _snapshot(metadata, arrays)
    except (_Refused, SafetensorError, KeyError) as problem:  # KeyError: a dtype that numpy does not have
        reason = problem.args[0] if isinstance(problem, _Refused) else f"is damaged ({problem})"
        raise InputError(f"{_named(path)} {reason}; {REMEDY}") from problem
    known = metadata.get("tokenizer")
    return snapshot, known if tokenizer is None else _matched(path, snapshot, known, tokenizer)


class _Refused(Exception):
    """What is wrong with a file, as the predicate of a sentence."""


def _named(path: str | os.PathLike[str]) -> str:
    return f"memory file {os.fspath(path)!r}"


def _short(fingerprint: str | None) -> str:
    return (fingerprint or "")[:8]


def _foreign(path: str | os.PathLike[str], what: str, given: str) -> InputError:
    return InputError(
        f"{_named(path)} {what}, and the tokenizer given is {_short(given)}: "
        f"give the tokenizer that the memory was filled with, or {REMEDY}"
    )


def _matched(path: str | os.PathLike[str], snapshot: Snapshot, known: str | None, tokenizer: Any) -> str:
    """The fingerprint of this tokenizer; if the file does not name the one it is of, its ids must fit at least."""
    given = fingerprint_of(tokenizer)
    if known not in (None, given):
        raise _foreign(path, f"is of the tokenizer {_short(known)}", given)
    if known is None:
        largest = max(_largest_id(snapshot.old), _largest_id(snapshot.young))
        if largest >= len(tokenizer):
            raise InputError(
                f"{_named(path)} has the id {largest}, and the tokenizer given has only {len(tokenizer)}: "
                f"give the tokenizer that the memory was filled with, or {REMEDY}"
            )
    return given


def _largest_id(slots: Ints) -> int:
    tokens = slots[:, 2:] & TOKEN
    return int(tokens[tokens != TOKEN].max(initial=-1))


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


def _sealed(whole: bytes) -> bytes:
    """With the checksum in its place."""
    place = _CHECKSUM.search(whole)
    assert place is not None, "the metadata has it"
    digest = hashlib.sha256(whole).hexdigest().encode()
    return b"".join([whole[: place.start(1)], digest, whole[place.end(1) :]])


def _checked_metadata(whole: bytes) -> dict[str, str]:
    """The metadata of a file of this format that is as it was written."""
    end = 8 + int.from_bytes(whole[:8], "little")
    try:
        header = json.loads(whole[8:end])
    except (ValueError, RecursionError) as problem:
        raise _Refused("is damaged, or was never one: its header cannot be read") from problem
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise _Refused(f"is something else: its header does not say that its format is {FORMAT}")
    if metadata.get("version") != str(VERSION):
        raise _Refused(
            f"has version {metadata.get('version')} of the format, and lade {__version__} reads version {VERSION}: "
            "use the lade that wrote it"
        )
    place = _CHECKSUM.search(whole, 8, end)
    if place is None or _checksum(whole, place) != place[1]:
        raise _Refused("is damaged: its checksum is wrong")
    if metadata.get("layout") != _LAYOUT:
        raise _Refused(f"has the layout {metadata.get('layout')}, and lade {__version__} reads {_LAYOUT}")
    return metadata


def _checksum(whole: bytes, place: re.Match[bytes]) -> bytes:
    view, digest = memoryview(whole), hashlib.sha256()
    for part in (view[: place.start(1)], _UNKNOWN, view[place.end(1) :]):
        digest.update(part)
    return digest.hexdigest().encode()


def _checked_arrays(arrays: Arrays) -> Arrays:
    """The tensors, each with its dtype, its shape and numbers that make sense."""
    for name in ("old", "young"):
        slots = _checked(arrays, name, np.int32, None, 2 + WIDTH)
        kinds = slots[:, 0] & KINDS
        if not ((kinds >= 1) & (kinds <= END)).all():
            raise _Refused(f"is damaged: {name} has a key of no order")
        if (slots[:, 2:] < 0).any() or (slots[:, 2:] >> BITS > 255).any():
            raise _Refused(f"is damaged: {name} has an entry that is none")
        if len(np.unique(slots[:, :2], axis=0)) < len(slots):
            raise _Refused(f"is damaged: {name} has a key twice")
    if not np.isfinite(_checked(arrays, "weights", np.float64, LINES, END + 1)).all():
        raise _Refused("is damaged: weights has what is no number")
    return arrays


def _checked(arrays: Arrays, name: str, dtype: npt.DTypeLike, *shape: int | None) -> npt.NDArray[Any]:
    """The tensor of that name; None in a shape stands for any length."""
    array = arrays.get(name)
    if array is None:
        raise _Refused(f"is damaged: it lacks {name}")
    fits = array.ndim == len(shape) and all(want in (None, size) for want, size in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits:
        wanted = ["n" if size is None else size for size in shape]
        raise _Refused(f"is damaged: {name} is {array.dtype} {list(array.shape)}, not {np.dtype(dtype)} {wanted}")
    return array


def _snapshot(metadata: Mapping[str, str], arrays: Arrays) -> Snapshot:
    try:
        max_bytes = int(metadata["max_bytes"])
    except (KeyError, ValueError) as problem:
        raise _Refused(f"is damaged: its metadata are incomplete ({problem})") from problem
    if max_bytes < LEAST_BYTES:
        raise _Refused(f"is damaged: max_bytes={max_bytes} is less than {LEAST_BYTES}")
    return Snapshot(arrays["old"], arrays["young"], arrays["weights"], max_bytes)


class Memory(ContextMemory):
    """What follows the contexts seen; the least recently used are evicted first.

    By default each generation has a memory of its own. Pass one to keep it across generations:

    >>> memory = lade.Memory()
    >>> config = lade.LookaheadConfig(memory=memory)
    >>> lade.generate(model, input_ids=ids, lookahead=config)

    Similar texts are then written faster. What made one user's text fast, another user's clock could notice: share a
    memory only between users who may know of each other's texts. Threads may share one.

    Args:
        max_bytes: what it may take at most. A context takes about 50 bytes.

    Attributes:
        fingerprint: of the tokenizer that it was loaded or saved with, None if there was none.

    Raises:
        ConfigError: `max_bytes` is no whole number, or too small.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        super().__init__(max_bytes)
        self.fingerprint: str | None = None

    def save(self, path: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Save it to a file, which holds all of it or is left as it was. Other threads may learn meanwhile.

        >>> memory.save("stories.memory", tokenizer)
        >>> memory = lade.Memory.load("stories.memory", tokenizer)

        Args:
            path: the file.
            tokenizer: the tokenizer of the model that filled it; the file is tied to its vocabulary. None: to the
                tokenizer that the memory was loaded or saved with before, if any.

        Raises:
            InputError: it cannot be written, or the memory is of another tokenizer.
        """
        fingerprint = agreed(path, self.fingerprint, tokenizer)
        write(path, self.snapshot(), fingerprint)
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer: Any = None, *, max_bytes: int | None = None) -> Self:
        """A memory from a file.

        Args:
            path: the file.
            tokenizer: the tokenizer of the model that is to use it. None: it is not checked whether the file is of the
                same one.
            max_bytes: see `Memory`; None: as it was saved. If it is less, longer contexts go before shorter ones,
                among those used lately and among the others.

        Raises:
            InputError: the file cannot be read, is damaged, or is of another tokenizer.
            ConfigError: `max_bytes` is no whole number, or too small.
        """
        snapshot, fingerprint = read(path, tokenizer)
        memory = cls.of(snapshot, max_bytes)
        memory.fingerprint = fingerprint
        return memory
