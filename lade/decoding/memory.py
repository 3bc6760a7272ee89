"""A memory of what follows a context: the likeliest tokens of every row of logits ever computed.

A context is the last 1, 2, 3, 5 or 8 tokens of a text. Whatever a pass computes, accepted or not, is paid for, so each
node's row of logits is kept under the five ends of the node's text. A row that comes to a context already known is
averaged with what is there, half and half: what was seen lately counts most.

Source of the idea: Token Recycling (arXiv 2408.08696) keeps the last row under the last token.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lade.decoding import memory_file
from lade.decoding.contexts import ENTRY, MASKS, ORDERS, TOKEN, WIDTH, entries_of, row_bytes
from lade.decoding.memory_contents import Contents, Table
from lade.decoding.mixer import Mixer
from lade.decoding.readout import Readout
from lade.errors import ConfigError

ENTRY_BYTES = 200
"""What one context takes in memory, its share of the tables included; a test holds it."""
DEFAULT_BYTES = 128 * 2**20


class Memory:
    """What follows the contexts seen, the least recently used forgotten first.

    By default each generation has one of its own. Hand one in to keep it across generations:

    >>> memory = lade.Memory()
    >>> config = lade.LookaheadConfig(memory=memory)
    >>> lade.generate(model, input_ids=ids, lookahead=config)

    Texts that look alike are then written faster. What made one user's text fast, another user's clock could notice:
    share a memory only between those who may know of each other's texts.

    Args:
        max_bytes: roughly what it may take; a context takes about 220 bytes.

    Attributes:
        mixer: what has been learned about how far its rows are to be trusted.
        fingerprint: of the tokenizer that it was loaded or saved with, None if there was none.

    Raises:
        ConfigError: `max_bytes` is not a positive whole number.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < ENTRY_BYTES:
            raise ConfigError("max_bytes", max_bytes, f"give a whole number of bytes >= {ENTRY_BYTES}")
        self.max_bytes = max_bytes
        self.mixer = Mixer()
        self.fingerprint: str | None = None
        self._young: list[Table] = [{} for _ in ORDERS]
        self._old: list[Table] = [{} for _ in ORDERS]
        self._writing = threading.Lock()

    def __len__(self) -> int:
        """Number of contexts."""
        return sum(len(young.keys() | old.keys()) for young, old in zip(self._young, self._old, strict=True))

    def lookup(self, context: int) -> list[bytes]:
        """Rows for the ends of `context`, the shortest end first, as many as are known; see `unpack_row`."""
        rows = []
        for young, old, mask in zip(self._young, self._old, MASKS, strict=True):
            end = context & mask
            row = young.get(end) or old.get(end)
            if row is None:  # a longer end is known only if the shorter ones are
                break
            rows.append(row)
        return rows

    def learn(self, contexts: Sequence[int], readout: Readout) -> None:
        """Take in what the model said.

        Args:
            contexts: `[M]`, see `context_of`.
            readout: `[M, K]`, the likeliest tokens behind each.
        """
        new = entries_of(readout.tokens, readout.values)
        packed = row_bytes(new)
        ends = [[context & mask for context in contexts] for mask in MASKS]
        with self._writing:
            known: list[bytes] = []
            for young, old, keys in zip(self._young, self._old, ends, strict=True):
                known += map(young.get, keys, map(old.get, keys, packed))  # what is new is averaged with itself
            before = np.frombuffer(b"".join(known), dtype=ENTRY).reshape(len(ORDERS), len(contexts), WIDTH)
            means = row_bytes(_averaged(before, new))
            for number, (young, keys) in enumerate(zip(self._young, ends, strict=True)):
                young.update(zip(keys, means[number * len(keys) :], strict=False))
            if sum(map(len, self._young)) > self.max_bytes // (2 * ENTRY_BYTES):
                self._old, self._young = self._young, [{} for _ in ORDERS]

    def save(self, path: str | os.PathLike[str], tokenizer: Any = None) -> None:
        """Save it to a file, which holds all of it or is left as it was. Others may go on learning meanwhile.

        >>> memory.save("stories.memory", tokenizer)
        >>> memory = lade.Memory.load("stories.memory", tokenizer)

        Args:
            path: of the file.
            tokenizer: of the model that filled it; the file is tied to its vocabulary. None: to the tokenizer that the
                memory was loaded or saved with before, if any.

        Raises:
            InputError: it cannot be written, or the memory is of another tokenizer.
        """
        fingerprint = memory_file.agreed(path, self.fingerprint, tokenizer)
        with self._writing:
            old, young = [dict(table) for table in self._old], [dict(table) for table in self._young]
        weights = [list(weights) for weights in self.mixer.weights]
        memory_file.write(path, Contents(old, young, weights, self.max_bytes, fingerprint))
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer: Any = None, *, max_bytes: int | None = None) -> Memory:
        """A memory from a file.

        Args:
            path: of the file.
            tokenizer: of the model that is to use it. None: it is not checked whether the file is of the same one.
            max_bytes: as of `Memory`; None: as it was saved. If it is less, the newest contexts are kept.

        Raises:
            InputError: the file cannot be read, is damaged, or is of another tokenizer.
            ConfigError: `max_bytes` is not a positive whole number.
        """
        contents = memory_file.read(path, tokenizer)
        memory = cls(max(contents.max_bytes, ENTRY_BYTES) if max_bytes is None else max_bytes)
        memory._old, memory._young = contents.old, contents.young
        if memory.max_bytes < contents.max_bytes:
            memory._old, memory._young = contents.newest(memory.max_bytes // (2 * ENTRY_BYTES))
        memory.mixer.weights, memory.fingerprint = contents.weights, contents.fingerprint
        return memory


def _averaged(before: npt.NDArray[np.int32], new: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The means of rows of entries `[N, M, WIDTH]` and `[M, WIDTH]`. A token that one of them lacks counts 0 there.

    The longest axis goes last, where numpy is fast.
    """
    before, new = before.transpose(2, 0, 1).copy(), new.T.copy()[:, None]  # [WIDTH, N, M] and [WIDTH, 1, M]
    tokens = before & TOKEN
    same = tokens[:, None] == new & TOKEN  # [before, new, N, M]
    total = (same * (before - tokens)[:, None]).sum(0, dtype=ENTRY)
    total += new
    np.putmask(before, same.any(1), TOKEN)
    both = np.concatenate([total, before]).reshape(2 * WIDTH, -1).T.copy()
    both.partition(WIDTH, axis=1)
    best = both[:, WIDTH:]
    return best >> 1 & ~TOKEN | best & TOKEN
