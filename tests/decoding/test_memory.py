"""The memory: rows under the ends of a text, averaged with what came before, bounded, and shared by threads."""

import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.contexts import BITS, MASKS, ORDERS, TOKEN, WIDTH, context_of, extended, unpack_row
from lade.decoding.memory import ENTRY_BYTES, Memory
from lade.decoding.readout import Readout
from lade.errors import ConfigError

Row = dict[int, int]


def readout_of(rows: list[Row]) -> Readout:
    tokens = np.array([list(row) for row in rows], dtype=np.int32)
    return Readout(tokens, np.array([list(row.values()) for row in rows], dtype=np.uint8))


def unpacked(row: bytes) -> Row:
    """Tokens that a row says anything of."""
    entries = [(entry & TOKEN, entry >> BITS) for entry in unpack_row(row)]
    assert len({token for token, value in entries if value}) == sum(value > 0 for _, value in entries)
    return {token: value for token, value in entries if value}


def random_readout(rng: np.random.Generator, rows: int) -> Readout:
    tokens = np.stack([rng.choice(4000, WIDTH, replace=False) for _ in range(rows)]).astype(np.int32)
    return Readout(tokens, -np.sort(-rng.integers(1, 256, (rows, WIDTH))).astype(np.uint8))


def row(width: int) -> st.SearchStrategy[Row]:
    tokens = st.integers(0, 9) | st.just(TOKEN - 1)
    return st.dictionaries(tokens, st.integers(0, 255), min_size=width, max_size=width)


@pytest.mark.parametrize("width", (2, WIDTH))
@given(data=st.data())
def test_a_row_is_averaged_with_what_was_there(width, data):
    """Against plain Python: half and half, a token that one row lacks counts 0 there, and the best ones are kept."""
    memory, context = Memory(), context_of([3])
    expected: Row = {}
    for number, new in enumerate(data.draw(st.lists(row(width), min_size=1, max_size=5))):
        memory.learn([context], readout_of([new]))
        both = expected.keys() | new.keys()
        mean = {t: (expected.get(t, 0) + new.get(t, 0)) // 2 for t in both} if number else dict(new)
        found = unpacked(memory.lookup(context)[0])
        kept = sorted(mean.values(), reverse=True)[:WIDTH]
        assert sorted(found.values(), reverse=True) == [value for value in kept if value]
        assert found.items() <= mean.items()
        expected = found


def test_several_rows_of_one_step_do_not_mix():
    memory, rng = Memory(), np.random.default_rng(0)
    contexts = [context_of([n]) for n in range(8)]
    first, second = random_readout(rng, 8), random_readout(rng, 8)
    memory.learn(contexts, first)
    memory.learn(contexts, second)
    for number, context in enumerate(contexts):
        alone = Memory()
        alone.learn([context], first[number : number + 1])
        alone.learn([context], second[number : number + 1])
        assert unpacked(memory.lookup(context)[0]) == unpacked(alone.lookup(context)[0])


def test_each_end_has_a_row_of_its_own():
    memory = Memory()
    memory.learn([context_of([1, 3])], readout_of([{5: 100, 6: 50}]))
    memory.learn([context_of([2, 3])], readout_of([{5: 40, 7: 20}]))
    short, long, *_ = map(unpacked, memory.lookup(context_of([2, 3])))
    assert short == {5: 70, 6: 25, 7: 10} and long == {5: 40, 7: 20}
    assert unpacked(memory.lookup(context_of([1, 3]))[1]) == {5: 100, 6: 50}


def test_what_is_about_to_be_forgotten_is_averaged_too():
    memory, context = Memory(2 * len(ORDERS) * ENTRY_BYTES), context_of([3])
    memory.learn([context], readout_of([{5: 100, 6: 50}]))
    memory.learn([context_of([4])], readout_of([{5: 1, 6: 1}]))  # now both are old
    memory.learn([context], readout_of([{5: 40, 7: 20}]))
    assert unpacked(memory.lookup(context)[0]) == {5: 70, 6: 25, 7: 10}


def test_no_rows_teach_nothing():
    memory = Memory()
    memory.learn([], Readout(np.zeros((0, WIDTH), np.int32), np.zeros((0, WIDTH), np.uint8)))
    assert len(memory) == 0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_what_is_known_is_the_ends_that_both_texts_share(text, other):
    memory = Memory()
    memory.learn([context_of(text)], readout_of([{1: 9, 2: 5}]))
    found = memory.lookup(context_of(other))
    ends = [context_of(text) & mask == context_of(other) & mask for mask in MASKS]
    assert len(found) == sum(ends) and ends == sorted(ends, reverse=True)
    assert len(memory) == len(ORDERS)


def test_contexts_are_the_last_tokens_and_know_the_start_of_a_text():
    assert context_of([7, 8]) == extended(context_of([7]), 8)
    assert context_of(list(range(20))) == context_of(list(range(20 - ORDERS[-1], 20)))
    assert context_of([0]) != context_of([0, 0]) != context_of([])
    assert all(context_of([5, 5, 5, 1]) & mask == context_of([6, 5, 5, 1]) & mask for mask in MASKS[:3])
    assert context_of([5, 5, 5, 1]) & MASKS[3] != context_of([6, 5, 5, 1]) & MASKS[3]


def test_forgetting_keeps_to_the_bound_and_spares_what_is_used():
    limit = 2000
    memory, rng = Memory(limit * ENTRY_BYTES), np.random.default_rng(0)
    for step in range(800):
        texts = [context_of([1, 2, 3, 4, 5])] + [context_of(rng.integers(0, 4000, 5).tolist()) for _ in range(4)]
        memory.learn(texts, random_readout(rng, 5))
        assert len(memory) <= limit + 5 * len(ORDERS)
        assert len(memory.lookup(texts[0])) == len(ORDERS), step
    assert len(memory) > limit // 2


def test_an_entry_takes_as_much_as_it_is_counted_for():
    rng, limit = np.random.default_rng(0), 40_000
    batches = [
        ([context_of(rng.integers(0, 4000, 5).tolist()) for _ in range(50)], random_readout(rng, 50))
        for _ in range(300)
    ]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        memory = Memory(limit * ENTRY_BYTES)
        peak = 0
        for contexts, readout in batches:
            memory.learn(list(map(int, contexts)), readout)
            peak = max(peak, tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * memory.max_bytes
    assert peak > 0.4 * memory.max_bytes  # or else it would forget what there is room for


def test_threads_may_share_a_memory():
    memory, failures = Memory(1000 * ENTRY_BYTES), []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                contexts = [context_of(rng.integers(0, 12, 5).tolist()) for _ in range(6)]
                memory.learn(contexts, random_readout(rng, 6))
                for context in contexts:
                    assert all(len(row) == 4 * WIDTH for row in memory.lookup(context))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(memory) <= 1000 + 4 * 6 * len(ORDERS)


@pytest.mark.parametrize("max_bytes", (0, -1, ENTRY_BYTES - 1, 1e9, True, "1"))
def test_a_size_that_is_none_is_refused(max_bytes):
    with pytest.raises(ConfigError, match="max_bytes"):
        Memory(max_bytes)
