"""The memory: rows under the ends of a text, averaged with what came before, bounded, and shared by threads."""

import gc
import re
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memories import Reference, known, learn, likeliest, random_rows, tails_of
from reference.tables import LIKELIEST
from spies import failing

from lade import native
from lade.decoding.drafting.memory import LEAST_BYTES, SLOT_BYTES, context_of
from lade.decoding.kernels import tables
from lade.decoding.kernels.layout import END, LONGEST, ORDERS, TEXT, TEXT_ORDERS, TOKEN, WIDTH
from lade.decoding.kernels.native_tree import NativeTree
from lade.decoding.tree import TokenTree
from lade.errors import ConfigError
from lade.memory import Memory

HUGE = TOKEN - 1  # the largest token that fits into a row


texts = st.lists(st.integers(0, 2), min_size=1, max_size=10)
full_rows = st.dictionaries(st.integers(0, 9), st.integers(0, 255), max_size=WIDTH)
lessons = st.one_of(st.tuples(texts, full_rows), st.tuples(texts, st.integers(0, 9)))


@given(st.lists(st.lists(lessons, max_size=6), max_size=6), texts)
def test_it_says_what_a_dictionary_would_say(steps, other):
    """Of rows of logits and of what followed in texts, each under its own ends, whatever comes in between."""
    memory, reference = Memory(), Reference()
    for step in steps:
        said = [(text, row) for text, row in step if isinstance(row, dict)]
        heard = [(text, token) for text, token in step if isinstance(token, int)]
        learn(memory, [text for text, _ in said], [row for _, row in said])
        memory.learn_text(tails_of([text for text, _ in heard]), [token for _, token in heard])
        for text, row in said:
            reference.learn(text, row)
        for text, token in heard:
            reference.learn(text, {token: 255}, TEXT, END)
    for text in [other, *(text for step in steps for text, _ in step)]:
        assert known(memory, text) == reference.known(text)
    assert len(memory) == len(reference.rows)


def test_tokens_that_do_not_fit_into_a_row_are_ignored():
    """As contexts they serve like any others."""
    memory, most = Memory(), 2**31 - 1
    for number, token in enumerate((HUGE, TOKEN, TOKEN + 1, 2**22, most)):
        memory.learn_text(tails_of([[number] * LONGEST]), [token])
        assert known(memory, [number] * LONGEST)[1] == [{HUGE: 255} if token == HUGE else {}] * len(TEXT_ORDERS)
        learn(memory, [[token]], [{number: 9}])
    for number, token in enumerate((HUGE, TOKEN, TOKEN + 1, 2**22, most)):
        assert known(memory, [token])[0] == [{number: 9}] * len(ORDERS)


def test_tails_are_the_last_tokens_and_know_the_start_of_a_text_which_may_be_empty():
    assert context_of([7, 8]).tolist() == [8, 7] + [-1] * (LONGEST - 2)
    assert context_of(range(20)).tolist() == list(range(19, 19 - LONGEST, -1))
    assert context_of([]).tolist() == [-1] * LONGEST and context_of([]).dtype == np.int32
    memory = Memory()
    learn(memory, [[]], [{1: 2}])
    assert known(memory, []) == ([{1: 2}] * len(ORDERS), []) and known(memory, [0]) == ([], [])


# ---------------------------------------------------------------------------------------------------------- forgetting


def slots(memory: Memory) -> int:
    return sum(map(len, memory.tables))


def taken(memory: Memory) -> int:
    """Slots of the table that is written that are taken; none, when tables have just been changed over."""
    return int(np.count_nonzero(memory.tables[0][:, 0]))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("max_bytes", (LEAST_BYTES, LEAST_BYTES + 63, 50_000, 128_000))
@pytest.mark.parametrize("batch", (1, 7, 300))
def test_forgetting_keeps_to_the_bound_and_spares_what_is_used(max_bytes, batch):
    memory, rng = Memory(max_bytes), np.random.default_rng(0)
    used, most = [1, 2, 3, 4, 5, 6, 7, 8, 9], 0
    for step in range(20_000 // (batch + 20)):
        texts = [rng.integers(0, 4000, 9).tolist() for _ in range(batch)]
        memory.learn(tails_of([used, *texts]), random_rows(rng, 1)[[0] * (batch + 1)])
        memory.learn_text(tails_of([used]), [7])
        assert slots(memory) * SLOT_BYTES <= max_bytes
        assert len(memory) <= slots(memory)
        if batch * END < max_bytes // SLOT_BYTES // 4:
            assert [len(rows) for rows in known(memory, used)] == [len(ORDERS), len(TEXT_ORDERS)], step
        assert likeliest(memory.lookup(texts[-1])[0][-1]) >= 0, "the last one is always known"
        most = max(most, len(memory))
    assert most > 0.3 * max_bytes // SLOT_BYTES, "there is room for more"


@pytest.mark.parametrize("batch", (1, 2, 5))
@pytest.mark.parametrize("of_text", (False, True))
def test_nothing_is_forgotten_before_there_is_no_more_room(batch, of_text):
    """However few contexts come at once, while tables grow."""
    memory, token = Memory(2**21), 0
    ends = len(TEXT_ORDERS) if of_text else len(ORDERS)
    while len(memory) + batch * ends <= 2 * (2**21 // (2 * SLOT_BYTES)) // 3:
        texts = [[token + number] * LONGEST for number in range(batch)]
        if of_text:
            memory.learn_text(tails_of(texts), [3] * batch)
        else:
            learn(memory, texts, [{3: 9}] * batch)
        token += batch
        assert taken(memory) == token * ends, "and so the tables are not changed over"
        if len(memory) > 10_000:
            break
    assert all(len(memory.lookup([n] * LONGEST)[of_text]) == ends for n in range(token))


def in_order(table: np.ndarray) -> np.ndarray:
    """The slots that are taken, sorted."""
    taken = table[table[:, 0] != 0]
    return taken[np.lexsort(taken.T)]


@pytest.mark.parametrize(("max_bytes", "most"), [(LEAST_BYTES, 20), (9_000, 20), (2**24, 50)])
def test_a_step_is_learned_as_its_logits_and_then_its_text(max_bytes, most):
    """To the slot, also where tables are changed over in the midst of it; logits of unlikely nodes come first."""
    one, other, rng = Memory(max_bytes), Memory(max_bytes), np.random.default_rng(0)
    grower, changes = NativeTree(), 0
    for step in range(300):
        nodes, accepted, before = int(rng.integers(1, most)), int(rng.integers(1, 4)), other.tables[1]
        text, rows = rng.integers(0, 40, 9).tolist(), random_rows(rng, nodes)
        tree, contexts = TokenTree(text[-1]), [text]
        for number in range(1, nodes):
            contexts.append([*contexts[number // 3], int(rng.integers(0, 40))])
            tree.extend(contexts[-1][-1:], [number // 3], [len(contexts[-1]) - len(text)], "other")
        grower.start(text)
        grower.extend(tree, 1)
        path, tokens, tails = rng.integers(0, nodes, accepted), rng.integers(0, 40, accepted), tails_of(contexts)
        one.learn_tree(grower, rows, path, tokens)
        order = [*range(LIKELIEST, nodes), *range(min(LIKELIEST, nodes))]
        other.learn(tails[order], rows[order])
        other.learn_text(tails[path], tokens)
        assert len(one) == len(other)
        if max_bytes < 2**24 or step % 20 == 19:  # in a large one nothing is ever lost
            for mine, theirs in zip(one.tables, other.tables, strict=True):
                assert np.array_equal(in_order(mine), in_order(theirs))
        changes += other.tables[1] is not before
    assert (changes > 5) == (max_bytes < 2**24)


def test_slots_lie_within_lines_of_the_processors_caches():
    """A slot takes half of a line of 64 bytes; those that straddle two take twice as long to fetch."""
    memory = Memory(2**20)
    for number in range(400):
        learn(memory, [[number]], [{5: 100}])
        assert all(table.ctypes.data % 64 == 0 for table in memory.tables)


def traced(max_bytes: int, batches: int, batch: int) -> tuple[int, int, Memory]:
    """The most bytes that a memory has taken, those of its last moment, and the memory."""
    rng = np.random.default_rng(0)
    tails = [rng.integers(0, 4000, (batch, LONGEST)).astype(np.int32) for _ in range(batches)]
    rows = random_rows(rng, batch)
    gc.collect()
    Memory(max_bytes).learn(tails[0], rows)  # what the first call of a kernel allocates stays
    tracemalloc.start()
    try:
        memory = Memory(max_bytes)
        for some in tails:
            memory.learn(some, rows)
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak, current, memory


@pytest.mark.skipif(native.library() is None, reason="a reference makes Python's objects of a table")
@pytest.mark.parametrize("max_bytes", (100_000, 3_000_000))
def test_it_takes_as_many_bytes_as_it_may_and_no_more(max_bytes):
    """Even while its tables grow or change over, but for a few objects."""
    peak, current, memory = traced(max_bytes, 600, 50)
    assert max(peak, current) < max_bytes + 32_000  # objects that Python keeps for later, up to 25 kB have been seen
    assert current > 0.97 * max_bytes, "or else it would forget what there is room for"
    assert len(memory) > 0.3 * max_bytes / SLOT_BYTES


def test_a_small_memory_takes_little():
    peak, _, memory = traced(2**30, 3, 20)
    assert len(memory) <= 3 * 20 * len(ORDERS) and peak < 4 * SLOT_BYTES * 1000


# ------------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("max_bytes", (20_000, 2**24))
def test_threads_may_share_a_memory(max_bytes):
    """While it grows, or forgets; where there is room nothing is lost."""
    memory, start = Memory(max_bytes), threading.Barrier(4)
    learned: list[list[int]] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        start.wait()
        for number in range(120):
            texts = [[seed, *rng.integers(0, 500, 8).tolist()] for _ in range(6)]
            rows = random_rows(rng, 6, vocabulary=50)
            memory.learn(tails_of(texts), rows)
            memory.learn_text(tails_of(texts), [seed] * 6)
            learned.append(texts[0])
            for text in texts:
                of_logits, of_text = known(memory, text)
                assert all(token < 50 for row in of_logits for token in row)
                assert all(set(row) <= {0, 1, 2, 3} for row in of_text)
            assert number % 10 or len(memory) <= max_bytes // SLOT_BYTES

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [None] * 4
    if max_bytes > 2**20:
        assert all(known(memory, text)[1][-1].keys() == {text[0]} for text in learned)
        assert all(len(known(memory, text)[0]) == len(ORDERS) for text in learned)


@pytest.mark.parametrize("max_bytes", (0, -1, LEAST_BYTES - 1, 1e9, True, "1", None))
def test_a_size_that_is_none_is_refused(max_bytes):
    with pytest.raises(ConfigError, match="max_bytes"):
        Memory(max_bytes)


@pytest.mark.parametrize(
    ("tails", "rows"), [((2, LONGEST), (1, WIDTH)), ((2, LONGEST - 1), (2, WIDTH)), ((1, LONGEST), (1, 3))]
)
def test_rows_that_do_not_belong_to_the_contexts_are_refused(tails, rows):
    with pytest.raises(ValueError, match="do not belong together"):
        Memory().learn(np.zeros(tails, np.int32), np.zeros(rows, np.int32))


def test_slots_taken_by_an_interrupted_call_are_counted(monkeypatch):
    """Ctrl-C is raised when compiled code returns. A table that does not know how full it is would come to be full."""
    memory, rng = Memory(), np.random.default_rng(0)
    with monkeypatch.context() as patch:
        failing(patch, tables, "learn", KeyboardInterrupt, after=True)
        with pytest.raises(KeyboardInterrupt):
            memory.learn(tails_of(rng.integers(0, 4000, (50, LONGEST)).tolist()), random_rows(rng, 50))
    assert len(memory) == taken(memory) > 100


def test_its_repr_says_how_much_is_in_it():
    memory = Memory(max_bytes=64 * 2**20)
    assert repr(memory) == "Memory(0 contexts, 0.0 of 64.0 MiB)"
    learn(memory, [[token, token + 1] for token in range(3000)], [{7: 9}] * 3000)
    found = re.fullmatch(r"Memory\(([\d,]+) contexts, ([\d.]+) of 64\.0 MiB\)", repr(memory))
    assert found is not None and int(found[1].replace(",", "")) == len(memory) > 3000
    assert float(found[2]) == round(sum(table.nbytes for table in memory.tables) / 2**20, 1) > 0.1
