"""Learning from many requests at once: what learning from one after the other does."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lade
from lade.decoding.kernels.layout import BITS, TOKEN, WIDTH
from lade.errors import InputError

VOCABULARY = 30


def some_rows(rng, count):
    tokens = rng.permuted(np.tile(np.arange(VOCABULARY), (count, 1)), axis=1)[:, :WIDTH]
    return np.sort((rng.integers(0, 256, tokens.shape) << BITS | tokens).astype(np.int32))[:, ::-1].copy()


def contents(memory):
    held = memory.snapshot()
    return [sorted(map(tuple, slots.tolist())) for slots in (held.young, held.old)], held.weights.tobytes()


def begun(count, size, trees, rng):
    """A drafter, with requests of two tenants."""
    drafter = lade.EngineDrafter(VOCABULARY, [3], trees=trees, price=0.02, memory=lade.Memory(size))
    other = lade.Memory(size)
    for name in range(count):
        drafter.begin(name, rng.integers(0, VOCABULARY, 12).tolist(), other if name % 3 == 2 else None)
    return drafter, other


@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from([4096, 2**16, 2**22]), st.booleans(), st.data())
def test_it_is_what_learning_one_by_one_is(seed, count, size, trees, data):
    """Whatever fits into tables, texts and trees, and whatever does not at first."""
    (one, its), (many, others) = (begun(count, size, trees, np.random.default_rng(seed)) for _ in range(2))
    rng, names = np.random.default_rng(seed), list(range(count))
    for _ in range(6):
        budgets = rng.integers(0, 40, count).tolist()
        if data.draw(st.booleans()):
            drafts = many.propose(names, budgets)
            assert drafts == [one.propose([name], budget)[0] for name, budget in zip(names, budgets, strict=True)]
        else:  # some requests have no draft
            drafts = many.propose(names[1:], budgets[1:])
            assert one.propose(names[1:], budgets[1:]) == drafts
            drafts = [lade.EngineDraft([], [], []), *drafts]
        tokens, rows = [], []
        for draft in drafts:
            first = [] if not draft.ids or rng.random() < 0.3 else draft.ids[:1]
            longest = 70 if rng.random() < 0.1 else 3
            tokens.append(first + rng.integers(0, VOCABULARY, rng.integers(1, longest)).tolist())
            needed = draft.path(tokens[-1])[-1] + 1
            rows.append(some_rows(rng, int(rng.integers(needed, len(draft) + 2))))
        order = sorted(names, key=lambda name: len(drafts[name]) > 0 or name > 0)
        for name in order:
            one.learn(name, tokens[name], rows[name])
        many.learn_batch(order, [tokens[name] for name in order], [rows[name] for name in order])
        assert contents(one.memory) == contents(many.memory) and contents(its) == contents(others)
        assert one._with_rows == many._with_rows
        for name in names:
            assert one.text(name) == many.text(name)


def test_requests_without_rows_are_learned_from_too_and_what_one_takes_is_free_when_it_has_ended():
    drafter, _ = begun(4, 2**16, False, np.random.default_rng(0))
    drafts = drafter.propose(range(4), 5)
    rows = [None, some_rows(np.random.default_rng(0), len(drafts[1]) + 1), None, None]
    drafter.learn_batch(range(4), [[1], [2], [3], np.array([4])], rows)
    assert [drafter.text(name)[-1] for name in range(4)] == [1, 2, 3, 4]
    drafter, _ = begun(2, 2**16, False, np.random.default_rng(0))
    drafter.propose([0, 1], 4)
    tree = weakref.ref(drafter._requests[0].tree)
    drafter.end(0)
    gc.collect()
    assert tree() is None


@pytest.mark.parametrize(
    "names, tokens, rows, says",
    [
        ([0, 0], [[1], [1]], [1, 1], "each request once"),
        ([0, 1], [[1]], [1, 1], "one entry for each request"),
        ([0, 1], [[1], [VOCABULARY]], [1, 1], f"id {VOCABULARY}"),
        ([0, 1], [[1], [1.5]], [1, 1], "float64"),
        ([0, 1], [[1], []], [1, 1], "at least one"),
        ([0, 1], [[1], [1]], [1, 50], "50, where 1 to"),
        ([0, 1], [[1], [1]], [1, 0], "0, where 1 to"),
        ([0, 7], [[1], [1]], [1, 1], "request=7 is not known"),
    ],
)
def test_what_does_not_fit_is_refused(names, tokens, rows, says):
    drafter, _ = begun(3, 2**16, False, np.random.default_rng(0))
    drafter.propose([0, 1, 2], 4)
    before = [list(drafter.text(name)) for name in range(3)]
    with pytest.raises(InputError, match=says):
        drafter.learn_batch(names, tokens, [some_rows(np.random.default_rng(0), count) for count in rows])
    assert [drafter.text(name) for name in range(3)] == before
    assert TOKEN > VOCABULARY
