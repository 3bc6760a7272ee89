"""The walk."""

import pytest

from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict, walk


@pytest.fixture
def tree() -> TokenTree:
    tree = TokenTree(0)
    tree.add_path([1, 2, 3], "pool")
    tree.add_path([1, 4], "prompt")
    return tree  # nodes: 0 root, 1 "1", 2 "2", 3 "3", 4 "4"


def test_it_follows_what_the_model_chooses_and_adds_the_bonus_after_a_miss_too(tree):
    emitted: list[int] = []
    verdict = walk(tree, {0: 1, 1: 4, 4: 8}.__getitem__, emitted.append)
    assert verdict.path == [0, 1, 4]
    assert verdict.tokens == emitted == [1, 4, 8]
    assert verdict.sources == ["pool", "prompt", "bonus"]
    verdict = walk(tree, lambda node: 7, lambda token: False)
    assert (verdict.path, verdict.tokens, verdict.sources) == ([0], [7], ["bonus"])


def test_nothing_is_chosen_behind_a_stop(tree):
    asked: list[int] = []

    def choose(node: int) -> int:
        asked.append(node)
        return {0: 1, 1: 2}[node]

    verdict = walk(tree, choose, lambda token: token == 2)
    assert asked == [0, 1]
    assert verdict.done and verdict.tokens == [1, 2] and verdict.path == [0, 1]
    assert verdict.sources == ["pool", "pool"]


@pytest.mark.parametrize("fails", ["choose", "emit"])
def test_what_was_accepted_before_an_error_is_known(tree, fails):
    def choose(node: int) -> int:
        if node == 1 and fails == "choose":
            raise KeyboardInterrupt
        return {0: 1, 1: 2}[node]

    def emit(token: int) -> bool:
        if token == 2:
            raise KeyboardInterrupt
        return False

    verdict = Verdict()
    with pytest.raises(KeyboardInterrupt):
        walk(tree, choose, emit, verdict)
    assert (verdict.path, verdict.tokens, verdict.sources, verdict.done) == ([0, 1], [1], ["pool"], False)
