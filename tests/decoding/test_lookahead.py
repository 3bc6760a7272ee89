"""The Jacobi trajectory."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.drafting.lookahead import Window
from lade.decoding.tree import ROOT, TokenTree

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


def test_rows_move_as_drawn():
    window = window_of(3, 3)
    window.rows = [[0, 11, 12, 13]]
    assert window.advance(5, [20, 21, 22, 23]) == []
    assert window.rows == [[5, 12, 13], [21, 22, 23]]
    assert window.advance(6, [31, 32, 33]) == [(5, 21, 31), (12, 22, 32), (13, 23, 33)]
    assert window.rows == [[6, 22, 23], [31, 32, 33]]


def test_beyond_the_depth_of_the_tree_there_are_no_tips():
    window = window_of(4, 2)
    tips = window.plant(TokenTree(0, max_depth=1))
    assert tips[0] == ROOT and tips[1] is not None and tips[2:] == [None, None]


def test_row_0_is_drawn_from_the_prompt_and_the_seed_alone():
    first, again = (Window(5, 4, 3, [7, 8, 9], random.Random(2)).rows for _ in range(2))
    assert first == again
    assert len(first[0]) == 5 + 4 - 2 and set(first[0][1:]) <= {7, 8, 9}


@pytest.mark.parametrize("wrong", [2, 4])
def test_a_wrong_number_of_choices_is_an_error(wrong):
    window = window_of(3, 2)
    with pytest.raises(ValueError, match="argument"):
        window.advance(1, [1] * wrong)
