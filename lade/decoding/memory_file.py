"""A memory as a file: a versioned format in the container safetensors, with a checksum over all of it.

    metadata       format, version, layout (what the numbers mean), library, max_bytes, young, tokenizer, sha256
    contexts.K     int32 [n, K]      the contexts of K tokens, the oldest first; -1: before the text
    tokens.K       int32 [n, WIDTH]  the row of each; -1: none
    values.K       uint8 [n, WIDTH]
    weights.R      float64 [R + 1]   the mixer's, where R rows are found

`young` says how many at the end of each table were used lately. The checksum is the SHA-256 of the file as it was when
the checksum's own digits were zeros. So not one byte can change unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors import numpy as container

from lade.decoding.contexts import BITS, ORDERS, TOKEN, WIDTH, entries_of, row_bytes, tokens_and_values
from lade.decoding.memory_contents import Contents
from lade.decoding.mixer import Mixer
from lade.decoding.readout import CEILING, FLOOR
from lade.errors import InputError
from lade.version import __version__

FORMAT = "lade.memory"
VERSION = 1
REMEDY = "fill a new one with lade warm"

Arrays = Mapping[str, npt.NDArray[Any]]

_WORD = 64
_WORDS = -(-BITS * ORDERS[-1] // _WORD)
_KEY_BYTES = 8 * _WORDS
_LAYOUT = json.dumps({"orders": ORDERS, "width": WIDTH, "log_odds": [FLOOR, CEILING]})
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
        known: of the tokenizer that the memory has been loaded or saved with; None if there was none.
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


def write(path: str | os.PathLike[str], contents: Contents) -> None:
    """Write a file; whoever reads meanwhile, or after a failure, finds the old one whole.

    Only its owner may read a new file, since it tells of texts. The permissions of a file that was there stay.

    Raises:
        InputError: it cannot be written.
    """
    whole = _sealed(container.save(_tensors(contents), _metadata(contents)))
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file():
            raise InputError(f"{_named(path)} cannot be written: it is no regular file; give the name of a file")
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f"{target.name}.", suffix=".tmp")
        try:
            with open(handle, "wb") as file:
                file.write(whole)
                file.flush()
                os.fsync(file.fileno())
            if target.exists():
                shutil.copymode(target, name)
            os.replace(name, target)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise InputError(
            f"{_named(path)} cannot be written: {reason}; check folder, permissions and free space"
        ) from problem


def read(path: str | os.PathLike[str], tokenizer: Any = None) -> Contents:
    """Read a file, and believe none of it unchecked.

    Args:
        path: of the file.
        tokenizer: the one it is to be used with; None: it is not checked whether it is of the same one.

    Raises:
        InputError: it cannot be read, is damaged or something else, or is of another tokenizer.
    """
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
        contents = _contents(metadata, arrays)
    except (_Refused, SafetensorError, KeyError) as problem:  # KeyError: a dtype that numpy does not have
        reason = problem.args[0] if isinstance(problem, _Refused) else f"is damaged ({problem})"
        raise InputError(f"{_named(path)} {reason}; {REMEDY}") from problem
    return contents if tokenizer is None else _matched(path, contents, arrays, tokenizer)


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


def _matched(path: str | os.PathLike[str], contents: Contents, arrays: Arrays, tokenizer: Any) -> Contents:
    """The contents, of this tokenizer; where the file does not say which one it is of, its ids must fit at least."""
    given = fingerprint_of(tokenizer)
    if contents.fingerprint not in (None, given):
        raise _foreign(path, f"is of the tokenizer {_short(contents.fingerprint)}", given)
    if contents.fingerprint is None:
        ids = [array for name, array in arrays.items() if name.startswith(("contexts.", "tokens.")) and array.size]
        largest = max((int(array.max()) for array in ids), default=-1)
        if largest >= len(tokenizer):
            raise InputError(
                f"{_named(path)} has the id {largest}, and the tokenizer given has only {len(tokenizer)}: "
                f"give the tokenizer that the memory was filled with, or {REMEDY}"
            )
    return Contents(contents.old, contents.young, contents.weights, contents.max_bytes, given)


def _metadata(contents: Contents) -> dict[str, str]:
    facts = {
        "format": FORMAT,
        "version": str(VERSION),
        "layout": _LAYOUT,
        "library": __version__,
        "max_bytes": str(contents.max_bytes),
        "young": json.dumps([len(table) for table in contents.young]),
        "sha256": _UNKNOWN.decode(),
    }
    return facts if contents.fingerprint is None else {**facts, "tokenizer": contents.fingerprint}


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
    for order in ORDERS:
        length = len(_checked(arrays, f"contexts.{order}", np.int32, None, order))
        _checked(arrays, f"tokens.{order}", np.int32, length, WIDTH)
        _checked(arrays, f"values.{order}", np.uint8, length, WIDTH)
        for name in (f"contexts.{order}", f"tokens.{order}"):
            wrong = (arrays[name] < -1) | (arrays[name] >= TOKEN)
            if wrong.any():
                raise _Refused(f"is damaged: {name} has the id {arrays[name][wrong][0]}")
    for weights in Mixer().weights:
        name = f"weights.{len(weights) - 1}"
        if not np.isfinite(_checked(arrays, name, np.float64, len(weights))).all():
            raise _Refused(f"is damaged: {name} has what is no number")
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


def _contents(metadata: Mapping[str, str], arrays: Arrays) -> Contents:
    try:
        max_bytes, young = int(metadata["max_bytes"]), [int(count) for count in json.loads(metadata["young"])]
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise _Refused(f"is damaged: its metadata are incomplete ({problem})") from problem
    lengths = [len(arrays[f"contexts.{order}"]) for order in ORDERS]
    if max_bytes < 1 or len(young) != len(ORDERS) or not all(0 <= y <= n for y, n in zip(young, lengths, strict=True)):
        raise _Refused(f"is damaged: max_bytes={max_bytes} and young={young} do not fit its tables")
    old_tables, young_tables = [], []
    for order, length, count in zip(ORDERS, lengths, young, strict=True):
        entries = list(zip(_keys(arrays[f"contexts.{order}"]), _rows(arrays, order), strict=True))
        old_tables.append(dict(entries[: length - count]))
        young_tables.append(dict(entries[length - count :]))
    weights = [arrays[f"weights.{len(prior) - 1}"].tolist() for prior in Mixer().weights]
    return Contents(old_tables, young_tables, weights, max_bytes, metadata.get("tokenizer"))


def _tensors(contents: Contents) -> dict[str, npt.NDArray[Any]]:
    tensors: dict[str, npt.NDArray[Any]] = {}
    for order, old, young in zip(ORDERS, contents.old, contents.young, strict=True):
        entries = [*((key, row) for key, row in old.items() if key not in young), *young.items()]
        tensors[f"contexts.{order}"] = _contexts([key for key, _ in entries], order)
        tensors[f"tokens.{order}"], tensors[f"values.{order}"] = tokens_and_values([row for _, row in entries])
    for weights in contents.weights:
        tensors[f"weights.{len(weights) - 1}"] = np.array(weights, dtype=np.float64)
    return tensors


def _rows(arrays: Arrays, order: int) -> list[bytes]:
    return row_bytes(entries_of(arrays[f"tokens.{order}"], arrays[f"values.{order}"]))


def _contexts(keys: Sequence[int], order: int) -> npt.NDArray[np.int32]:
    """`[n, order]` tokens of contexts as numbers, see `context_of`."""
    words = np.frombuffer(b"".join([key.to_bytes(_KEY_BYTES, "little") for key in keys]), dtype="<u8").reshape(
        -1, _WORDS
    )
    tokens = np.empty((len(keys), order), dtype=np.int32)
    for place in range(order):
        word, shift = divmod(BITS * place, _WORD)
        bits = words[:, word] >> np.uint64(shift)
        if shift + BITS > _WORD:
            bits = bits | words[:, word + 1] << np.uint64(_WORD - shift)
        tokens[:, order - 1 - place] = (bits & np.uint64(TOKEN)).astype(np.int32) - 1
    return tokens


def _keys(tokens: npt.NDArray[np.int32]) -> list[int]:
    """The contexts as numbers; the inverse of `_contexts`."""
    words = np.zeros((len(tokens), _WORDS), dtype="<u8")
    for place in range(tokens.shape[1]):
        bits = (tokens[:, tokens.shape[1] - 1 - place].astype(np.int64) + 1).astype(np.uint64)
        word, shift = divmod(BITS * place, _WORD)
        words[:, word] |= bits << np.uint64(shift)
        if shift + BITS > _WORD:
            words[:, word + 1] |= bits >> np.uint64(_WORD - shift)
    whole = words.tobytes()
    return [int.from_bytes(whole[start : start + _KEY_BYTES], "little") for start in range(0, len(whole), _KEY_BYTES)]
