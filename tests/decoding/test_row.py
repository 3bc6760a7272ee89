"""What a row learns."""

import torch

from lade import LookaheadConfig
from lade.decoding.drafting.lookahead import LookaheadDrafter, chosen_ngrams
from lade.decoding.readout import Readout
from lade.decoding.row import Row
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Greedy, walk


def test_every_node_teaches_what_the_model_chose_after_it():
    tree = TokenTree(0)
    tree.add_path([1, 2, 3], "pool")
    tree.add_path([4], "pool")
    argmax_ids = [9, 2, 3, 7, 8]  # at the root, and after 1, 2, 3, 4
    assert chosen_ngrams(tree, argmax_ids, ngram=5) == [(1, 2, 3, 7), (2, 3, 7), (3, 7), (4, 8)]
    assert chosen_ngrams(tree, argmax_ids, ngram=3) == [(1, 2, 3), (2, 3, 7), (3, 7), (4, 8)]


LOGITS = torch.zeros(1, 12)


def row_of(prompt: list[int], **sizes: object) -> Row:
    config = LookaheadConfig(**{"window": 0, "ngram": 3, "guesses": 4} | sizes)
    return Row(prompt, LookaheadDrafter(config), Greedy(), lambda _: False)


def test_the_prompts_ngrams_are_guesses_from_the_first_step():
    row = row_of([1, 2, 3, 1])
    row.choose_first(LOGITS, [2])
    assert row.drafter.pool.lookup(1) == [((2, 3), "prompt")]
    tree = row.drafter.draft(row.tokens, None).tree
    assert tree.ids == [2, 3, 1] and set(tree.sources[1:]) == {"prompt"}


def test_prompt_and_text_can_be_kept_out():
    row = row_of([1, 2, 3, 1], prompt_ngrams=False)
    row.choose_first(LOGITS, [2])
    assert len(row.drafter.pool) == 0


def test_accepted_text_is_learned_across_the_border_of_steps():
    row = row_of([1, 2])
    row.choose_first(LOGITS, [3])
    assert row.drafter.pool.lookup(1) == [((2, 3), "text")]
    draft = row.drafter.draft(row.tokens, None)
    verdict = walk(draft.tree, [4].__getitem__, row.emit)
    row.drafter.learn(row.tokens, draft, Readout([4]), verdict)
    assert row.drafter.pool.lookup(2) == [((3, 4), "text")]


def test_the_window_grows_under_the_current_token():
    row = row_of([5, 6, 7], window=2)
    row.choose_first(LOGITS, [8])
    tree = row.drafter.draft(row.tokens, None).tree
    assert tree.ids[0] == 8 and "window" in tree.sources
