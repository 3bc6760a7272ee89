"""What a row learns."""

import torch

from lade import LookaheadConfig
from lade.decoding.choose import Greedy
from lade.decoding.drafting.lookahead import LookaheadDrafter, chosen_ngrams
from lade.decoding.row import Row
from lade.decoding.tree import TokenTree
from lade.decoding.verify import walk


def test_every_node_teaches_what_the_model_chose_behind_it():
    tree = TokenTree(0)
    tree.add_path([1, 2, 3], "pool")
    tree.add_path([4], "pool")
    picks = [9, 2, 3, 7, 8]  # at the root, and behind 1, 2, 3, 4
    assert chosen_ngrams(tree, picks, ngram=5) == [(1, 2, 3, 7), (2, 3, 7), (3, 7), (4, 8)]
    assert chosen_ngrams(tree, picks, ngram=3) == [(1, 2, 3), (2, 3, 7), (3, 7), (4, 8)]


LOGITS = torch.zeros(1, 12)


def row_of(prompt: list[int], **sizes: object) -> Row:
    config = LookaheadConfig(**{"window": 0, "ngram": 3, "guesses": 4} | sizes)
    return Row(prompt, LookaheadDrafter(config), Greedy(), lambda _: False)


def test_the_prompts_ngrams_are_guesses_from_the_first_step():
    row = row_of([1, 2, 3, 1])
    row.open(LOGITS, [2])
    assert row.drafter.pool.lookup(1) == [((2, 3), "prompt")]
    tree = row.grow(None)
    assert tree.ids == [2, 3, 1] and set(tree.sources[1:]) == {"prompt"}


def test_prompt_and_text_can_be_kept_out():
    row = row_of([1, 2, 3, 1], prompt_ngrams=False)
    row.open(LOGITS, [2])
    assert len(row.drafter.pool) == 0


def test_accepted_text_is_learned_across_the_border_of_steps():
    row = row_of([1, 2])
    row.open(LOGITS, [3])
    assert row.drafter.pool.lookup(1) == [((2, 3), "text")]
    tree = row.grow(None)
    verdict = walk(tree, [4].__getitem__, row.emit)
    row.learn([4], None, verdict)
    assert row.drafter.pool.lookup(2) == [((3, 4), "text")]


def test_the_window_grows_under_the_current_token():
    row = row_of([5, 6, 7], window=2)
    row.open(LOGITS, [8])
    tree = row.grow(None)
    assert tree.ids[0] == 8 and "window" in tree.sources
