"""A memory of what follows a context: the likeliest tokens of every row of logits ever computed.

A context is the end of a text, a few tokens long; `kernels.ORDERS` tells how many. Whatever a pass computes, accepted
or not, is paid for, so each node's row of logits is kept under all ends of the node's text. What followed in the texts
themselves is kept too, apart from that, under the lengths of `kernels.TEXT_ORDERS`. A row that comes to a context
already known is averaged with what is there, half and half: what was seen lately counts most.

Source of the idea: Token Recycling (arXiv 2408.08696) keeps the last row under the last token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lade.config import BaseMemory
from lade.decoding import kernels
from lade.decoding.drafting import memory_file
from lade.decoding.drafting.memory_file import LEAST_BYTES, Contents
from lade.decoding.drafting.mixer import prior_weights
from lade.decoding.kernels import END, LOGITS, LONGEST, TEXT, WIDTH, Ints
from lade.errors import ConfigError
from lade.locks import ForkSafeLock

SLOT_BYTES = 4 * (2 + WIDTH)
DEFAULT_BYTES = 128 * 2**20
_FIRST_SLOTS = 1024


class Memory(BaseMemory):
    """What follows the contexts seen, the least recently used forgotten first.

    By default each generation has one of its own. Hand one in to keep it across generations:

    >>> memory = lade.Memory()
    >>> config = lade.LookaheadConfig(memory=memory)
    >>> lade.generate(model, input_ids=ids, lookahead=config)

    Texts that look alike are then written faster. What made one user's text fast, another user's clock could notice:
    share a memory only between those who may know of each other's texts.

    There are two tables. One is written, the other is what it was before: when the first has no more room, it becomes
    the second, whose contexts are forgotten unless they have come up again meanwhile.

    Args:
        max_bytes: what both tables may take at most. A context takes about 50 bytes.

    Attributes:
        weights: `[LINES, END + 1]`, what has been learned about how far its rows are to be trusted, see `mixer`.
        fingerprint: of the tokenizer that it was loaded or saved with, None if there was none.

    Raises:
        ConfigError: `max_bytes` is no whole number, or too small.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < LEAST_BYTES:
            raise ConfigError("max_bytes", max_bytes, f"give a whole number of bytes >= {LEAST_BYTES}")
        self.max_bytes = max_bytes
        self.weights = prior_weights()
        self.fingerprint: str | None = None
        self._most_slots = max_bytes // (2 * SLOT_BYTES)
        self._young, self._old = _table(min(_FIRST_SLOTS, self._most_slots)), _table(1)
        self._taken = 0
        self._writing = ForkSafeLock()

    def __len__(self) -> int:
        """Number of contexts."""
        with self._writing:
            return self._taken + int(kernels.count_missing(self._old, self._young))

    def __repr__(self) -> str:
        used = self._young.nbytes + self._old.nbytes
        return f"Memory({len(self):,} contexts, {used / 2**20:.1f} of {self.max_bytes / 2**20:.1f} MiB)"

    @property
    def tables(self) -> tuple[Ints, Ints]:
        """The one that is written, and the one before; see `kernels`."""
        return self._young, self._old

    def lookup(self, tokens: Sequence[int]) -> tuple[Ints, Ints]:
        """What is known about the ends of a text, shortest first: rows of logits, and rows of what followed in texts.

        Returns:
            `[R, WIDTH]` and `[R', WIDTH]` entries, see `kernels`.
        """
        rows = np.empty((END, WIDTH), np.int32)
        found, heard = kernels.look_up(*self.tables, tail_of(tokens), rows)
        return rows[:found], rows[TEXT : TEXT + heard]

    def learn(self, tails: Ints, rows: Ints) -> None:
        """Take in what the model said.

        Args:
            tails: `[M, LONGEST]`, contexts, see `kernels`.
            rows: `[M, WIDTH]`, entries of each.
        """
        self._learn(tails, rows, LOGITS, TEXT)

    def learn_text(self, tails: Ints, tokens: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Take in what followed in a text: `tokens`, `[M]`, each behind its context in `tails`, `[M, LONGEST]`."""
        self._learn(tails, kernels.certain(np.asarray(tokens, dtype=np.int64)), TEXT, END)

    def _learn(self, tails: Ints, rows: Ints, first: int, end: int) -> None:
        if tails.shape != (len(rows), LONGEST) or rows.shape[1:] != (WIDTH,):  # compiled code would read beyond
            raise ValueError(f"tails of shape {tails.shape} and rows of shape {rows.shape} do not belong together")
        with self._writing:
            learned = 0
            try:
                while learned < len(tails):
                    self._make_room((len(tails) - learned) * (end - first))
                    state = learned, self._taken, _most_taken(len(self._young))
                    learned, self._taken = kernels.learn(self._young, self._old, tails, rows, first, end, *state)
            except BaseException:  # Ctrl-C is raised when compiled code returns, which may have taken slots
                self._taken = int(np.count_nonzero(self._young[:, 0]))
                raise

    def _make_room(self, contexts: int) -> None:
        """For that many new ones, or at least for those of one more row."""
        slots, wanted = len(self._young), self._taken + max(contexts, END)
        while _most_taken(slots) < wanted and slots < self._most_slots:
            slots = min(2 * slots, self._most_slots)
        if slots > len(self._young):
            larger = _table(slots)
            kernels.rehash(self._young, larger)
            self._young = larger
        if _most_taken(slots) < self._taken + END:
            self._old = self._young  # frees the one before, so that there are never three
            self._young, self._taken = _table(slots), 0

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
            old, young = (table[table[:, 0] != 0] for table in (self._old, self._young))
            contents = Contents(old, young, self.weights.copy(), self.max_bytes, fingerprint)
        memory_file.write(path, contents)
        self.fingerprint = fingerprint

    @classmethod
    def load(cls, path: str | os.PathLike[str], tokenizer: Any = None, *, max_bytes: int | None = None) -> Memory:
        """A memory from a file.

        Args:
            path: of the file.
            tokenizer: of the model that is to use it. None: it is not checked whether the file is of the same one.
            max_bytes: as of `Memory`; None: as it was saved. If it is less, longer contexts go before shorter ones,
                among those used lately and among the others.

        Raises:
            InputError: the file cannot be read, is damaged, or is of another tokenizer.
            ConfigError: `max_bytes` is no whole number, or too small.
        """
        contents = memory_file.read(path, tokenizer)
        memory = cls(contents.max_bytes if max_bytes is None else max_bytes)
        memory.weights, memory.fingerprint = contents.weights, contents.fingerprint
        room = _most_taken(memory._most_slots)
        old, young = contents.old, contents.young
        if max(len(old), len(young)) > room:
            old, young = contents.reduced(room)
        memory._old, memory._young = _table_of(old, memory._most_slots), _table_of(young, memory._most_slots)
        memory._taken = len(young)
        return memory


def tail_of(tokens: Sequence[int]) -> Ints:
    """The context `[LONGEST]` at the end of a text, see `kernels`."""
    tail = np.full(LONGEST, -1, np.int32)
    last = tokens[-LONGEST:][::-1]
    tail[: len(last)] = last
    return tail


def _table(slots: int) -> Ints:
    """An empty one."""
    return np.zeros((slots, 2 + WIDTH), np.int32)


def _table_of(taken: Ints, most_slots: int) -> Ints:
    """One with these slots, and room for some more."""
    slots = min(_FIRST_SLOTS, most_slots)
    while _most_taken(slots) < len(taken):
        slots = min(2 * slots, most_slots)
    table = _table(slots)
    kernels.rehash(taken, table)
    return table


def _most_taken(slots: int) -> int:
    """How many slots of a table may be taken: fuller, it would be slow."""
    return 2 * slots // 3
