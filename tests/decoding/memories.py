"""Rows and memories made by hand, and what they ought to say, in plain Python."""

from collections.abc import Iterable, Sequence
from math import exp

import numpy as np
import pytest

from lade.decoding.drafting import memory as memory_module
from lade.decoding.drafting.memory import context_of
from lade.decoding.kernels.layout import (
    BITS,
    END,
    FLOOR,
    LONGEST,
    ORDERS,
    SCALE,
    TEXT,
    TEXT_ORDERS,
    TOKEN,
    WIDTH,
    Doubles,
    Ints,
)
from lade.decoding.kernels.native_tree import NativeTree
from lade.memory import Memory

Row = dict[int, int]
"""Value by token."""
NEGLIGIBLE = -4.6


def rows_of(rows: Sequence[Row]) -> Ints:
    """As entries `[M, WIDTH]`, in falling order of their values."""
    entries = np.full((len(rows), WIDTH), TOKEN, np.int32)
    for row, known in enumerate(rows):
        for place, (token, value) in enumerate(sorted(known.items(), key=lambda pair: -pair[1])):
            entries[row, place] = value << BITS | token
    return entries


def unpacked(row: Iterable[int]) -> Row:
    """What a row of entries says; none says anything twice, or of less before more."""
    entries = [int(entry) for entry in row]
    pairs = [(entry & TOKEN, entry >> BITS) for entry in entries if entry & TOKEN != TOKEN]
    assert all(0 <= value <= 255 for _, value in pairs)
    assert [value for _, value in pairs] == sorted((value for _, value in pairs), reverse=True)
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def likeliest(row: Sequence[int]) -> int:
    return int(row[0]) & TOKEN


def tails_of(texts: Sequence[Sequence[int]]) -> Ints:
    return np.array([context_of(text) for text in texts], np.int32).reshape(-1, LONGEST)


def learn(memory: Memory, texts: Sequence[Sequence[int]], rows: Sequence[Row]) -> None:
    memory.learn(tails_of(texts), rows_of(rows))


def known(memory: Memory, text: Sequence[int]) -> tuple[list[Row], list[Row]]:
    """What a memory says to a text, either kind."""
    logits, followed = memory.lookup(text)
    return [unpacked(row) for row in logits], [unpacked(row) for row in followed]


def random_rows(rng: np.random.Generator, count: int, vocabulary: int = 4000) -> Ints:
    width = min(WIDTH, vocabulary)
    rows = np.full((count, WIDTH), TOKEN, np.int32)
    for row in rows:
        values = np.sort(rng.integers(1, 256, width))[::-1]
        row[:width] = values << BITS | rng.choice(vocabulary, width, replace=False)
    return rows


def filled_memory(seed: int, vocabulary: int = 8, texts: int = 30) -> Memory:
    """Random rows under the ends of random texts, some of them many times: about half of all contexts are known."""
    memory, rng = Memory(), np.random.default_rng(seed)
    for _ in range(texts):
        text = rng.integers(0, vocabulary, 6).tolist()
        tails = tails_of([text[: end + 1] for end in range(len(text))])
        memory.learn(tails, random_rows(rng, len(text), vocabulary))
        if rng.random() < 0.5:
            memory.learn_text(tails[:-1], text[1:])
    return memory


def memory_saying(text: Sequence[int], of_logits: Sequence[Row], of_text: Sequence[Row] = ()) -> Memory:
    """One that has these rows under the ends of a text, the shortest first."""
    memory = Memory()
    for kind, row in [*enumerate(of_logits), *enumerate(of_text, TEXT)]:
        memory._learn(tails_of([text]), rows_of([row]), kind, kind + 1)
    return memory


CachedLogits = list[tuple[int, Row]]
"""Rows that are known, each with the number of its kind."""


class Reference:
    """A memory in plain Python, which never forgets."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, ...], Row] = {}

    def learn(self, text: Sequence[int], row: Row, first: int = 0, end: int = TEXT) -> None:
        for kind in range(first, end):
            key = self._key(text, kind)
            self.rows[key] = averaged(self.rows.get(key), row)

    def known(self, text: Sequence[int]) -> tuple[list[Row], list[Row]]:
        return self._known(text, range(TEXT)), self._known(text, range(TEXT, END))

    def _known(self, text: Sequence[int], kinds: Iterable[int]) -> list[Row]:
        rows = []
        for kind in kinds:
            row = self.rows.get(self._key(text, kind))
            if row is None:
                break
            rows.append(row)
        return rows

    @staticmethod
    def _key(text: Sequence[int], kind: int) -> tuple[int, ...]:
        length = (*ORDERS, *TEXT_ORDERS)[kind]
        return kind, *([-1] * length + list(text))[-length:]


def averaged(before: Row | None, new: Row) -> Row:
    """Half and half; a token that one of them lacks counts 0 there. Only where values are equal may others be kept."""
    if before is None:
        return dict(new)
    mean = {token: (before.get(token, 0) + new.get(token, 0)) // 2 for token in [*new, *before]}
    kept = sorted(mean.items(), key=lambda pair: (pair[1], pair[0]), reverse=True)[:WIDTH]
    return dict(kept)


def said_of(memory: Memory, text: Sequence[int]) -> CachedLogits:
    of_logits, of_text = known(memory, text)
    return [*enumerate(of_logits), *enumerate(of_text, TEXT)]


def line_of(said: CachedLogits) -> int:
    of_text = sum(kind >= TEXT for kind, _ in said)
    return (len(said) - of_text) * (len(TEXT_ORDERS) + 1) + of_text


def log_odds_of(value: int) -> float:
    return FLOOR + SCALE * value


def mixed(weights: Doubles, said: CachedLogits) -> dict[int, float]:
    """The weighted sums of log-odds of all tokens that some row suggests."""
    line = weights[line_of(said)]
    tokens = {token: None for _, row in said for token in row}
    return {token: line[END] + sum(line[k] * log_odds_of(row.get(token, 0)) for k, row in said) for token in tokens}


def downhill(weights: Doubles, said: CachedLogits, chosen: int) -> Doubles:
    """How the coding cost falls with the weights: its gradient, with the sign turned."""
    gradient = np.zeros_like(weights)
    line = gradient[line_of(said)]
    for token, odds in mixed(weights, said).items():
        if token != chosen and odds < NEGLIGIBLE:
            continue
        error = (token == chosen) - probability(odds)
        for kind, row in said:
            line[kind] += error * log_odds_of(row.get(token, 0))
        line[END] += error
    return gradient


def is_undecided(weights: Doubles, said: CachedLogits) -> bool:
    """Whether the sum of some token is so near to what is negligible that rounding decides."""
    return any(abs(odds - NEGLIGIBLE) < 1e-9 for odds in mixed(weights, said).values())


def probability(log_odds: float) -> float:
    return 1.0 / (1.0 + exp(-log_odds))


def learns_slowly(patch: pytest.MonkeyPatch) -> float:
    """Have weights change so little that it does not matter who comes first; returns the rate."""
    patch.setattr(memory_module, "RATE", 1e-9)
    return 1e-9


def reads_no_places(patch: pytest.MonkeyPatch) -> None:
    """Leave out what earlier places of a text say, which is added to what memories say."""
    patch.setattr(NativeTree, "read", lambda self, tokens: None)
