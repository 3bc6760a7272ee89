"""The compiled loops: hash tables that behave like dictionaries, contexts."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memories import Reference, rows_of, tails_of, unpacked

from lade import native
from lade.decoding.drafting.memory import context_of
from lade.decoding.kernels import tables
from lade.decoding.kernels.layout import END, LONGEST, TEXT, WIDTH, Ints


def table_of(slots: int) -> Ints:
    return np.zeros((slots, 2 + WIDTH), np.int32)


def taken(table: Ints) -> Ints:
    return table[table[:, 0] != 0]


def listed(table: Ints) -> list[list[int]]:
    return sorted(taken(table).tolist())


def slots_with(keys: list[tuple[int, int]]) -> Ints:
    """A list of slots, each with a row of its own."""
    rows = rows_of([{number % 1000: 1 + number % 255} for number in range(len(keys))])
    return np.hstack([np.array(keys, np.int32).reshape(-1, 2), rows])


def known(young: Ints, old: Ints, text: list[int]) -> tuple[list, list]:
    rows = np.full((END, WIDTH), -1, np.int32)
    found, heard = tables.look_up(young, old, context_of(text), rows)
    assert (rows[found:TEXT] == -1).all() and (rows[TEXT + heard :] == -1).all(), "only what is known is written"
    return [unpacked(row) for row in rows[:found]], [unpacked(row) for row in rows[TEXT : TEXT + heard]]


def test_contexts_that_differ_have_different_keys_which_are_spread_over_the_table():
    """Neighbouring tokens, at any place; few and many."""
    texts = [[token] for token in range(5000)]
    texts += [[a, b] for a in range(60) for b in range(60)]
    texts += [[0] * n for n in range(2, LONGEST + 1)]
    texts += [[2**31 - 1 - n, 5] for n in range(100)]
    reference = Reference()
    for text in texts:
        reference.learn(text, {}, 0, END)
    young, old = table_of(2**18), table_of(1)
    for first, end in ((0, TEXT), (TEXT, END)):
        tables.learn(young, old, tails_of(texts), rows_of([{}] * len(texts)), first, end, 0, 0, 2**18 - 1)
    assert len({(low, high) for low, high, *_ in listed(young)}) == len(taken(young)) == len(reference.rows)
    # With two thirds of the slots taken, as many as may be, no slot is far from where it is looked for first.
    size = 3000
    young, old = table_of(size), table_of(1)
    texts = [[token] for token in range(2 * size // 3)]
    tables.learn(young, old, tails_of(texts), rows_of([{}] * len(texts)), 0, 1, 0, 0, size - 1)
    homes = [(high % 2**32) * size >> 32 for high in young[:, 1].tolist()]
    ways = [(slot - home) % size for slot, home in enumerate(homes) if young[slot, 0]]
    assert len(ways) == len(texts)
    assert np.mean(ways) < 3 and max(ways) < 80  # 1 is what theory says of the mean


@pytest.mark.parametrize("high", (-1, 0, 1, 2**31 - 1, -(2**31)))
@pytest.mark.parametrize("sign", (1, -1))
def test_many_keys_may_want_the_same_slot_even_the_last_one(high, sign):
    count = 40
    wanted = slots_with([(sign * number, high) for number in range(1, count + 1)])
    table = table_of(count + 1)
    tables.rehash(wanted, table)
    assert listed(table) == listed(wanted)
    assert tables.count_missing(wanted, table) == 0
    others = slots_with([(sign * (count + 1), high), (sign, high ^ 1), (-sign, high)])
    assert tables.count_missing(others, table) == 3
    home = (high % 2**32) * (count + 1) >> 32
    assert table[home, 0] == sign, "the first one is where it is looked for first"
    assert table[(home + count) % (count + 1), 0] == 0, "the others follow, from the beginning again after the end"


token = st.integers(0, 2)
batches = st.lists(
    st.tuples(
        st.sampled_from([(0, TEXT), (TEXT, END), (0, 1), (TEXT - 1, TEXT), (TEXT, TEXT + 1)]),
        st.lists(
            st.tuples(st.lists(token, max_size=9), st.dictionaries(st.integers(0, 7), st.integers(0, 255), max_size=6)),
            max_size=6,
        ),
    ),
    max_size=10,
)


class Generations(Reference):
    """A memory in plain Python that forgets as the tables do."""

    def __init__(self) -> None:
        super().__init__()
        self.old: dict = {}

    def learn(self, text, row, first=0, end=TEXT) -> None:
        both, self.rows = {**self.old, **self.rows}, self.rows
        reference = Reference()
        reference.rows = both
        reference.learn(text, row, first, end)
        for kind in range(first, end):
            key = self._key(text, kind)
            self.rows[key] = both[key]

    def news(self, text, first, end) -> int:
        return sum(self._key(text, kind) not in self.rows for kind in range(first, end))

    def turn_over(self) -> None:
        self.old, self.rows = self.rows, {}

    def known(self, text):
        reference = Reference()
        reference.rows = {**self.old, **self.rows}
        return reference.known(text)


@given(batches, st.integers(END + 1, 40), st.data())
def test_tables_behave_as_two_dictionaries_do(batches, slots, data):
    """Learning stops exactly where there is no room for all ends, and goes on in the next generation.

    Tables may be enlarged at any time. No key is lost before the generation after its own has ended.
    """
    young, old, reference, taken_now = table_of(slots), table_of(1), Generations(), 0
    seen: list[list[int]] = []
    for (first, end), pairs in batches:
        tails, rows = tails_of([text for text, _ in pairs]), rows_of([row for _, row in pairs])
        most, learned = data.draw(st.integers(END, len(young) - 1)), 0
        while True:
            before = learned
            learned, taken_now = tables.learn(young, old, tails, rows, first, end, learned, taken_now, most)
            for text, row in pairs[before:learned]:
                assert len(reference.rows) + end - first <= most, "there was room"
                reference.learn(text, row, first, end)
                seen.append(text)
            assert taken_now == len(reference.rows) == len(taken(young)) < len(young)
            if learned == len(pairs):
                break
            assert taken_now + end - first > most, "there was no room"
            if data.draw(st.booleans()):
                larger = table_of(len(young) + END)
                tables.rehash(young, larger)
                young, most = larger, len(larger) - 1
            else:
                old, young, taken_now = young, table_of(len(young)), 0
                reference.turn_over()
        assert tables.count_missing(old, young) == len(reference.old.keys() - reference.rows.keys())
    for text in [*seen, data.draw(st.lists(token, max_size=9))]:
        assert known(young, old, text) == reference.known(text)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), st.data())
def test_contexts_of_a_text_are_the_tails_of_its_beginnings(text, data):
    start = data.draw(st.integers(0, len(text)))
    count = data.draw(st.integers(0, len(text) - start))
    tails = tables.tails_of(np.array(text, dtype=np.int64), start, count)
    assert tails.dtype == np.int32 and tails.flags.c_contiguous
    assert tails.shape == (count, LONGEST)
    assert tails.tolist() == tails_of([text[: start + row + 1] for row in range(count)]).tolist()


@pytest.mark.skipif(native.library() is None, reason="no compiled kernels here")
def test_kernels_take_turns():
    """They keep the interpreter's lock: nobody reads a table that is being written."""
    young, old, stop, failures = table_of(2**16), table_of(1), threading.Event(), []
    text = list(range(LONGEST))

    def read() -> None:
        while not stop.is_set():
            of_logits, _ = known(young, old, text)
            if len(of_logits) not in (0, TEXT) or any(row not in of_logits[:1] for row in of_logits):
                failures.append(of_logits)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(300):
        tails, rows = tails_of([text] * 40), rows_of([{number % 7: 200}] * 40)
        tables.learn(young, old, tails, rows, 0, TEXT, 0, 0, 2**16 - 1)
    stop.set()
    reader.join()
    assert not failures
