"""The paper's method: the n-gram pool, the Jacobi trajectory, and what a row learns."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lade import LookaheadConfig
from lade.decoding.drafting.lookahead import LookaheadDrafter, NGramPool, Window, chosen_ngrams
from lade.decoding.readout import Readout
from lade.decoding.row import Row
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import Greedy, walk

ngrams = st.lists(st.tuples(*[st.integers(0, 6)] * 3), max_size=60)


@given(ngrams, st.integers(0, 4), st.integers(1, 5))
def test_it_never_exceeds_its_bounds(learned, guesses, max_keys):
    pool = NGramPool(3, guesses, max_keys=max_keys)
    for ngram in learned:
        pool.learn([ngram], "pool")
        assert len(pool) <= guesses * max_keys
        assert all(len(pool.lookup(token)) <= guesses for token in range(7))


@given(ngrams, st.integers(1, 4))
def test_it_holds_the_most_recently_seen_continuations(learned, guesses):
    pool = NGramPool(3, guesses)
    pool.learn(learned, "pool")
    for token in range(7):
        recent: list[tuple[int, ...]] = []
        for key, *rest in reversed(learned):
            if key == token and tuple(rest) not in recent:
                recent.append(tuple(rest))
        assert [guess for guess, _ in pool.lookup(token)] == recent[:guesses]


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=5), max_size=40), st.integers(1, 5))
def test_no_continuation_begins_another(learned, guesses):
    pool = NGramPool(4, guesses)
    for ngram in learned:
        pool.learn([ngram], "pool")
        for token in range(3):
            held = [guess for guess, _ in pool.lookup(token)]
            assert len(held) <= guesses and all(1 <= len(guess) <= 3 for guess in held)
            assert not any(a != b and b[: len(a)] == a for a in held for b in held)
        newest = pool.lookup(ngram[0])[0][0]
        assert newest[: len(ngram) - 1] == tuple(ngram[1:4])


def test_a_shorter_sighting_refreshes_the_longer_one_and_a_key_not_extended_for_long_goes_first():
    pool = NGramPool(4, 2)
    pool.learn([(1, 2, 3, 4)], "text")
    pool.learn([(1, 5)], "pool")
    pool.learn([(1, 2, 3)], "pool")
    assert pool.lookup(1) == [((2, 3, 4), "text"), ((5,), "pool")]
    pool.learn([(1, 5, 6, 7)], "prompt")
    assert pool.lookup(1) == [((5, 6, 7), "prompt"), ((2, 3, 4), "text")]
    pool = NGramPool(2, 2, max_keys=2)
    pool.learn([(1, 2), (3, 4), (1, 5), (6, 7)], "pool")
    assert pool.lookup(3) == []
    assert [guess for guess, _ in pool.lookup(1)] == [(5,), (2,)]


@given(ngrams)
def test_nothing_follows_an_excluded_id(learned):
    pool = NGramPool(3, 4, excluded={0, 5})
    pool.learn(learned, "pool")
    for token in range(7):
        for guess, _ in pool.lookup(token):
            assert token not in (0, 5) and not {0, 5} & set(guess)


sizes = st.tuples(st.integers(1, 9), st.integers(2, 7))


def window_of(columns: int, ngram: int, current: int = 0) -> Window:
    return Window(columns, ngram, current, range(1, 50), random.Random(0))


@given(sizes)
def test_it_fills_in_n_minus_2_passes_and_keeps_w_columns(size):
    columns, ngram = size
    window = window_of(columns, ngram)
    passes = 0
    while not window.full:
        assert window.advance(100 + passes, [1000 + passes] * len(window.rows[0])) == []
        passes += 1
    assert passes == ngram - 2
    assert [len(row) for row in window.rows] == [columns] * (ngram - 1)


@given(sizes, st.integers(1, 6))
def test_each_step_of_a_full_window_sheds_one_ngram_a_column(size, steps):
    columns, ngram = size
    window = window_of(columns, ngram)
    fresh = iter(range(1000, 10_000))
    while not window.full:
        window.advance(1, [next(fresh) for _ in window.rows[0]])
    for step in range(steps):
        new = [next(fresh) for _ in range(columns)]
        before = [list(row) for row in window.rows]
        shed = window.advance(500 + step, new)
        assert shed == [(*(row[i] for row in before), new[i]) for i in range(columns)]
        assert window.rows[-1][1:] == new[1:]
        assert window.rows[0] == ([500 + step, *before[1][1:]] if ngram > 2 else [500 + step, *new[1:]])


@given(sizes)
def test_a_cell_lies_at_the_depth_of_its_row_and_column(size):
    columns, ngram = size
    window = window_of(columns, ngram)
    fresh = iter(range(1000, 10_000))  # all tokens differ, so that no cells merge
    while not window.full:
        window.advance(0, [next(fresh) for _ in window.rows[0]])
    tree = TokenTree(0)
    tips = window.plant(tree)
    assert len(tree) == columns * (ngram - 1)
    assert [tree.depths[tip] for tip in tips] == [ngram - 2 + i for i in range(columns)]
    for i, tip in enumerate(tips):
        node, path = tip, []
        while node != ROOT:
            path.append(tree.ids[node])
            node = tree.parents[node]
        column = [row[i] for row in window.rows[1:]]
        assert path[::-1] == window.rows[0][1 : i + 1] + column


def test_rows_move_as_drawn_row_0_by_the_prompt_and_the_seed_alone_and_beyond_the_tree_there_are_no_tips():
    window = window_of(3, 3)
    window.rows = [[0, 11, 12, 13]]
    assert window.advance(5, [20, 21, 22, 23]) == []
    assert window.rows == [[5, 12, 13], [21, 22, 23]]
    assert window.advance(6, [31, 32, 33]) == [(5, 21, 31), (12, 22, 32), (13, 23, 33)]
    assert window.rows == [[6, 22, 23], [31, 32, 33]]
    for wrong in (2, 4):
        with pytest.raises(ValueError, match="argument"):
            window_of(3, 2).advance(1, [1] * wrong)
    first, again = (Window(5, 4, 3, [7, 8, 9], random.Random(2)).rows for _ in range(2))
    assert first == again
    assert len(first[0]) == 5 + 4 - 2 and set(first[0][1:]) <= {7, 8, 9}
    window = window_of(4, 2)
    tips = window.plant(TokenTree(0, max_depth=1))
    assert tips[0] == ROOT and tips[1] is not None and tips[2:] == [None, None]


def test_every_node_teaches_what_the_model_chose_after_it():
    tree = TokenTree(0)
    tree.add_path([1, 2, 3], "pool")
    tree.add_path([4], "pool")
    argmax_ids = [9, 2, 3, 7, 8]  # at the root, and after 1, 2, 3, 4
    assert chosen_ngrams(tree, argmax_ids, ngram=5) == [(1, 2, 3, 7), (2, 3, 7), (3, 7), (4, 8)]
    assert chosen_ngrams(tree, argmax_ids, ngram=3) == [(1, 2, 3), (2, 3, 7), (3, 7), (4, 8)]


def row_of(prompt: list[int], first: int, **fields: object) -> Row:
    """A row that has chosen its first token."""
    config = LookaheadConfig(**{"window": 0, "ngram": 3, "guesses": 4} | fields)
    row = Row(prompt, LookaheadDrafter(config), Greedy(), lambda _: False)
    row.choose_first(torch.zeros(1, 12), [first])
    return row


def test_a_row_drafts_the_prompts_ngrams_and_accepted_text_and_grows_a_window_under_the_current_token():
    row = row_of([1, 2, 3, 1], 2)
    assert row.drafter.pool.lookup(1) == [((2, 3), "prompt")]
    tree = row.drafter.draft(row.tokens, None).tree
    assert tree.ids == [2, 3, 1] and set(tree.sources[1:]) == {"prompt"}
    assert len(row_of([1, 2, 3, 1], 2, prompt_ngrams=False).drafter.pool) == 0
    row = row_of([1, 2], 3)
    assert row.drafter.pool.lookup(1) == [((2, 3), "text")]
    draft = row.drafter.draft(row.tokens, None)
    verdict = walk(draft.tree, [4].__getitem__, row.emit)
    row.drafter.learn(row.tokens, draft, Readout([4]), verdict)
    assert row.drafter.pool.lookup(2) == [((3, 4), "text")]
    row = row_of([5, 6, 7], 8, window=2)
    tree = row.drafter.draft(row.tokens, None).tree
    assert tree.ids[0] == 8 and "window" in tree.sources
