"""Context memory: entries by hashed context, and the prior weights by which hits are mixed.

Log-odds from contexts of several lengths are summed with weights, as in context-mixing compressors (M. Mahoney, PAQ6,
2005): a token that both the last token and the last three suggest gets more than either alone. The weights are learned
from every node that verification reached, by gradient descent on the coding cost.

A context is a suffix of a text, of one of the lengths in `layout.ORDERS`. Logits at rejected nodes are paid for too, so
each node's row is stored under all these suffixes of the node's text. The tokens that followed in the texts themselves
are stored separately, under the lengths in `layout.TEXT_ORDERS`. A row for a known context is averaged with the old
one, half and half, so recent rows weigh most.

Source of the idea: Token Recycling (arXiv 2408.08696) keeps the last row under the last token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import is_
from typing import Self

import numpy as np
import numpy.typing as npt

from lade.config import BaseMemory
from lade.decoding.kernels import layout, tables
from lade.decoding.kernels.layout import END, LENGTHS, LOGITS, LONGEST, TEXT, WEIGHT_SETS, WIDTH, Doubles, Ints
from lade.decoding.kernels.native_tree import NativeTree
from lade.decoding.kernels.tables import Tables
from lade.errors import ConfigError
from lade.locks import ForkSafeLock
from lade.native import require_library

_OF_LOGITS = (
    (-2.5,),
    (0.5, -0.6),
    (0.35, 0.3, 0.2),
    (0.3, 0.2, 0.3, 0.55),
    (0.1, 0.1, 0.15, 0.75, 0.65),
    (0.1, 0.1, 0.1, 0.2, 0.6, 0.65),
)
"""By the number of hits with logits: the weight of each, shortest context first, and a bias. Close to what they
converge to on stories and code."""
_OF_TEXT = ((0.0,), (0.05, 0.2), (0.05, 0.05, 0.4))
RATE = 0.01
"""Of learning the weights: 0.02 yields 1 % fewer tokens per step, 0.005 as many (lab/log/drafting-and-mixing.md)."""

_WITH_MTP: tuple[tuple[float, ...], ...] = (
    (-0.15, 1.25, 0.0, 0.15),
    (0.0, 1.1, 0.1, 0.35),
    (0.2, 0.95, 0.25, 0.35),
    (0.3, 0.75, 0.25, 0.25),
    (0.25, 0.65, 0.1, 0.1),
    (0.25, 0.8, 0.05, 0.0),
)
"""By the number of hits with logits: weights of the final mixing with the predictions of an MTP layer; about what they
become on stories that a layer predicts with an agreement of 0.7."""
_MTP_SHARE = -1.0
"""Log-odds, 27 %: less than half, as a layer may be worth nothing, and enough for its record to show."""


def prior_weights() -> Doubles:
    """Return the prior weights of hits, `[WEIGHT_SETS, END + 1]`; the last column is the bias."""
    weights = np.zeros((WEIGHT_SETS, END + 1))
    lines = [(of_logits, of_text) for of_logits in _OF_LOGITS for of_text in _OF_TEXT]
    for line, ((*of_logits, bias), (*of_text, more_bias)) in enumerate(lines):
        weights[line, : len(of_logits)], weights[line, TEXT : TEXT + len(of_text)] = of_logits, of_text
        weights[line, END] = bias + more_bias
    return weights


@dataclass(frozen=True)
class MtpWeights:
    """How far the predictions of one model's MTP layer are trusted; texts share this, on several threads, too.

    They are weighed with what is known without them by a last mixing of log-odds; its weights are learned at nodes that
    verification reaches:

        odds = (1 - t) * memory + t * (a * memory + b * layer + c * max(memory, 0) + d)

    Weights a, b, c, d are those of the prediction's depth and of how many rows of logits the memory has found; t is the
    share that the layer has earned. A layer may be worth nothing, so the share begins low; it is one number that all
    nodes teach, so it is learned within some tens of steps, while the weights take hundreds.

    Attributes:
        lines: float64 `[MTP_DEPTHS * (len(ORDERS) + 1), MTP_INPUTS]`: a, b, c, d.
        trust: float64 `[1]`, log-odds of the share that the last mixing has.
    """

    lines: Doubles = field(default_factory=lambda: np.array(_WITH_MTP * layout.MTP_DEPTHS))
    trust: Doubles = field(default_factory=lambda: np.array([_MTP_SHARE]))


SLOT_BYTES = 4 * (2 + WIDTH)
LEAST_BYTES = 4096
"""Smallest `max_bytes`: two tables of one page together, each of which holds some rows of logits."""
_FIRST_SLOTS = LEAST_BYTES // (2 * SLOT_BYTES)
DEFAULT_BYTES = 128 * 2**20
"""Some two million contexts, so that hours of texts are kept; little beside any model."""
KINDS = (1 << END.bit_length()) - 1
"""Mask of the lowest bits of a slot's key: index into `layout.LENGTHS`, counted from 1."""


@dataclass(frozen=True)
class Snapshot:
    """Contents of a memory at one moment: slots of the former table and of the current one, `[n, 2 + WIDTH]` each.

    The former table has the contexts that have not been used lately; for the weights see `prior_weights`.
    """

    old: Ints
    young: Ints
    weights: Doubles
    max_bytes: int


class ContextMemory(BaseMemory):
    """Continuations of contexts seen, with LRU eviction.

    There are two tables. The current one is written; when it is full it replaces the former one, whose contexts are
    evicted unless they have been stored again meanwhile. Threads may share a memory.

    Args:
        max_bytes: size limit of both tables together, in bytes. A context takes about 50.

    Attributes:
        weights: `[WEIGHT_SETS, END + 1]`, weights of the mixer, which are learned; see `prior_weights`.

    Raises:
        ConfigError: `max_bytes` is no whole number, or too small.
        UnsupportedError: the compiled kernels are missing.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < LEAST_BYTES:
            raise ConfigError("max_bytes", max_bytes, f"give a whole number of bytes >= {LEAST_BYTES}")
        require_library()
        self.max_bytes = max_bytes
        self.weights = prior_weights()
        self._most_slots = max_bytes // (2 * SLOT_BYTES)
        self._young, self._old = _table(_FIRST_SLOTS), _table(1)
        self._taken = 0
        self._bound: Tables | None = None
        self._writing = ForkSafeLock()

    def __len__(self) -> int:
        """Number of contexts."""
        with self._writing:
            return self._taken + int(tables.count_missing(self._old, self._young))

    def __getstate__(self) -> dict[str, object]:
        """Return the state for pickling and copying: the present contents, without the lock."""
        with self._writing:
            copies = {name: vars(self)[name].copy() for name in ("_young", "_old", "weights")}
            return {**{name: each for name, each in vars(self).items() if name != "_writing"}, **copies, "_bound": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _writing=ForkSafeLock())

    def __repr__(self) -> str:
        used = self._young.nbytes + self._old.nbytes
        return f"{type(self).__name__}({len(self):,} contexts, {used / 2**20:.1f} of {self.max_bytes / 2**20:.1f} MiB)"

    @property
    def tables(self) -> tuple[Ints, Ints]:
        """The table being written and the previous one; see `layout`."""
        return self._young, self._old

    @property
    def bound(self) -> Tables:
        """Both tables and the weights as kernels take them; to be held during a call, as others may replace them."""
        arrays = self._young, self._old, self.weights
        bound = self._bound
        if bound is None or not all(map(is_, (bound.young, bound.old, bound.weights), arrays)):
            bound = self._bound = Tables(*arrays)
        return bound

    @contextmanager
    def lent(self) -> Iterator[Tables]:
        """Lend the tables to a kernel that counts the slots that it takes; others wait meanwhile."""
        with self._writing:
            bound = self.bound
            bound.counts[:] = self._taken, _most_taken(len(self._young))
            try:
                yield bound
            finally:
                self._taken = int(bound.counts[0])

    def lookup(self, tokens: Sequence[int]) -> tuple[Ints, Ints]:
        """Return entries after the suffixes of a text, shortest first: of logits, and of texts; see `layout`."""
        entries = np.empty((END, WIDTH), np.int32)
        logit_hits, text_hits = tables.look_up(*self.tables, context_of(tokens), entries)
        return entries[:logit_hits], entries[TEXT : TEXT + text_hits]

    def learn(self, contexts: Ints, entries: Ints) -> None:
        """Learn from logits, given `[M, WIDTH]` entries after each of `[M, LONGEST]` contexts, see `layout`."""
        self._learn(contexts, entries, LOGITS, TEXT)

    def learn_text(self, contexts: Ints, tokens: Sequence[int] | npt.NDArray[np.int64]) -> None:
        """Learn the tokens of a text: `tokens`, `[M]`, each after its context in `contexts`, `[M, LONGEST]`."""
        self._learn(contexts, tables.certain(np.asarray(tokens, dtype=np.int64)), TEXT, END)

    def learn_tree(self, tree: NativeTree, entries: Ints, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Learn from a tree that was fed: logits at its nodes, and `tokens` `[A]` after those of `path`, `[A]`.

        The weights are learned as well, and the tree's own; see `NativeTree.learn`.
        """
        with self._writing.lock:  # itself, as every step comes here
            self._widen(self._taken + TEXT * len(entries) + max((END - TEXT) * len(path), END))
            bound = self.bound
            bound.counts[:] = self._taken, _most_taken(len(self._young))
            try:
                has_room = tree.learn(bound, entries, path, tokens, RATE)
            finally:
                self._taken = int(bound.counts[0])
        if not has_room:
            self.learn(tree.contexts(range(len(entries))), entries)  # fills this table, then a new one
            self.learn_text(tree.contexts(path), tokens)

    def _learn(self, contexts: Ints, entries: Ints, first: int, end: int) -> None:
        if contexts.shape != (len(entries), LONGEST) or entries.shape[1:] != (WIDTH,):  # else read out of bounds
            shapes = f"contexts of shape {contexts.shape} and entries of shape {entries.shape}"
            raise ValueError(f"{shapes} do not belong together")
        with self._writing:
            learned = 0
            try:
                while learned < len(contexts):
                    self._make_room((len(contexts) - learned) * (end - first))
                    state = learned, self._taken, _most_taken(len(self._young))
                    learned, self._taken = tables.learn(self._young, self._old, contexts, entries, first, end, *state)
            except BaseException:  # such as an interrupt, which is raised when compiled code returns
                self._taken = int(np.count_nonzero(self._young[:, 0]))
                raise

    def _make_room(self, contexts: int) -> None:
        """Make room for that many new contexts, or at least for those of one row of logits."""
        self._widen(self._taken + max(contexts, END))
        slots = len(self._young)
        if _most_taken(slots) < self._taken + END:
            self._bound = None
            self._old = self._young  # frees the one before, so that there are never three
            self._young, self._taken = _table(slots), 0

    def _widen(self, wanted: int) -> None:
        """Grow the table to hold that many contexts, within the size limit."""
        slots = len(self._young)
        while _most_taken(slots) < wanted and slots < self._most_slots:
            slots = min(2 * slots, self._most_slots)
        if slots > len(self._young):
            larger = _table(slots)
            tables.rehash(self._young, larger)
            self._young, self._bound = larger, None

    def snapshot(self) -> Snapshot:
        """Return a copy of the present contents; other threads may learn meanwhile."""
        with self._writing:
            old, young = (table[table[:, 0] != 0] for table in (self._old, self._young))
            return Snapshot(old, young, self.weights.copy(), self.max_bytes)

    @classmethod
    def of(cls, snapshot: Snapshot, max_bytes: int | None = None) -> Self:
        """Return a memory with the contents of a snapshot, within `max_bytes`; None for the limit of the other memory.

        If the contents exceed it, longer contexts are dropped first, in either table.

        Raises:
            ConfigError: `max_bytes` is not a whole number, or too small.
        """
        memory = cls(snapshot.max_bytes if max_bytes is None else max_bytes)
        memory.weights, most = snapshot.weights, _most_taken(memory._most_slots)
        old, young = snapshot.old, snapshot.young
        if max(len(old), len(young)) > most:
            old, young = _shortest(old, most), _shortest(young, most)
        memory._old, memory._young = _table_of(old, memory._most_slots), _table_of(young, memory._most_slots)
        memory._taken = len(young)
        return memory


def context_of(tokens: Sequence[int]) -> Ints:
    """Return the context `[LONGEST]` at the end of a text, see `layout`."""
    context = np.full(LONGEST, -1, np.int32)
    last = tokens[-LONGEST:][::-1]
    context[: len(last)] = last
    return context


def _shortest(slots: Ints, most: int) -> Ints:
    """Return at most that many slots, those of the shortest contexts."""
    lengths = np.array(LENGTHS)[(slots[:, 0] & KINDS) - 1]
    return slots[np.argsort(lengths, kind="stable")][:most]


def _table(slots: int) -> Ints:
    """Return an empty table whose slots do not straddle lines of the processor's caches."""
    room = np.zeros(slots * (2 + WIDTH) + 16, np.int32)
    first = -room.ctypes.data // 4 % 16
    return room[first : len(room) - 16 + first].reshape(slots, 2 + WIDTH)


def _table_of(taken: Ints, most_slots: int) -> Ints:
    """Return a table with these slots, and room for more."""
    slots = _FIRST_SLOTS
    while _most_taken(slots) < len(taken):
        slots = min(2 * slots, most_slots)
    table = _table(slots)
    tables.rehash(taken, table)
    return table


def _most_taken(slots: int) -> int:
    """Return the maximum number of occupied slots, beyond which probing is slow."""
    return 2 * slots // 3
