"""What is known of places is weighed together with the memory.

Of earlier places what followed the end of a text there; of places ahead what the model said at them, as it is noted.
"""

import random

import numpy as np
import pytest
import torch
from effort import examples
from growing import writer_of, written
from hypothesis import given, settings
from hypothesis import strategies as st
from memories import learn, reads_no_places, rows_of
from reference.tree import EACH, LATEST, MOST_MATCHES, Tree

import lade
from lade import LookaheadConfig
from lade.decoding.drafting.adaptive import drafter_for
from lade.decoding.kernels.layout import CEILING, COPY_KINDS, FLOOR, NOTE_KINDS, SCALE, TOKEN, WIDTH
from lade.decoding.kernels.native_tree import NativeTree
from lade.decoding.tree import ROOT, TokenTree
from lade.memory import Memory
from lade.testing import toy_model
from lade_lab.fakes import FunctionRunner

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def links_of(text: list[int]) -> list[int]:
    return [
        max((before for before in range(number) if text[before] == text[number]), default=-1)
        for number in range(len(text))
    ]


def places_of(text: list[int], path: list[int]) -> list[tuple[int, int]]:
    """Behind the longest ends of the text, and then its path, that stood in the text before: place and length."""
    found = []
    for number in range(len(text) - 2, -1, -1):
        agreed = 0
        while agreed < 32 and agreed <= number and text[number - agreed] == text[len(text) - 1 - agreed]:
            agreed += 1
        if agreed:
            found.append((number + 1, agreed))
    kept = sorted(found[:128], key=lambda each: -each[1])[:MOST_MATCHES]
    for token in path:
        kept = [(start + 1, agreed + 1) for start, agreed in kept if text[start] == token and start + 1 < len(text)]
    return kept


def matches_of(tree: NativeTree, node: int) -> list[tuple[int, int]]:
    """Place and length."""
    parts = Tree(tree)
    return [tuple(match) for match in parts.matches[node, : parts.match_count[node]].tolist()]


@settings(max_examples=examples(80))
@given(st.booleans(), st.lists(texts, min_size=1, max_size=6), st.data())
def test_links_are_those_of_the_text_that_was_read_last(grows, pieces, data):
    """Be it another text, or a list that has grown, which is read on."""
    earlier, text = NativeTree(), []
    for piece in pieces:
        if grows:
            text += piece
        else:
            text = text[: data.draw(st.integers(0, len(text)))] + piece
        earlier.read(text)
        assert Tree(earlier).text == text and Tree(earlier).links == links_of(text)


def test_links_and_places_are_right_however_the_text_changes_and_grows():
    earlier = NativeTree()
    for number in range(60):
        text = [1, 2, 1, *range(100 * number, 100 * number + 99), 2]
        earlier.read(text)
        assert Tree(earlier).links == links_of(text)
    growth, text = NativeTree(), random.Random(0).choices(range(4), k=3000)
    for end in (1000, 3000):
        growth.read(text[:end])
        growth.start(text[:end])
        assert matches_of(growth, 0) == places_of(text[:end], []) != []


@settings(max_examples=examples(60))
@given(texts, st.lists(st.integers(0, 3), max_size=5))
def test_a_node_has_the_places_behind_the_longest_ends_of_its_text(text, path):
    growth, tree = NativeTree(), TokenTree(text[-1])
    growth.read(text)
    growth.start(text)
    tree.add_path(path, "pool")
    growth.extend(tree, 1)
    for node in range(len(tree)):
        assert matches_of(growth, node) == places_of(text, path[:node])


def test_what_followed_counts_as_often_as_it_did():
    growth, tree = NativeTree(), TokenTree(1)
    text = [1, 7, 1, 8, 1, 7, 2, 1, 9, 1]  # the end alone was followed by 7, 8, 7 and 9
    growth.read(text)
    growth.start(text)
    growth.extend(tree, 1)
    Memory().learn_tree(growth, rows_of([{7: 255}]), [ROOT], [7])  # asks about the root
    latest, each = ([int(entry) for entry in Tree(growth).copy_rows[0, kind]] for kind in (LATEST, EACH))
    assert [entry & TOKEN for entry in latest] == [9, *[TOKEN] * (WIDTH - 1)]
    values = {entry & TOKEN: FLOOR + SCALE * (entry >> 21) for entry in each if entry & TOKEN != TOKEN}
    assert values == pytest.approx({9: np.log(1 / 3.4), 7: np.log(2 / 2.4), 8: np.log(1 / 3.4)}, abs=SCALE)
    assert min(values.values()) >= FLOOR and max(values.values()) <= CEILING


def chance(text: list[int], *, read: bool) -> float:
    """Of 8, of which a memory is half sure behind a 3."""
    memory, growth = Memory(), NativeTree()
    learn(memory, [[3]], [{8: 150}])
    if read:
        growth.read(text)
    scores = growth.grow(memory.bound, text, [(9, 0.0)])
    return dict(zip(growth.paths(len(scores)), scores, strict=True))[8,]


def test_agreement_raises_and_disagreement_lowers_what_the_memory_says():
    agreeing, other = [1, 2, 3, 8, 5, 1, 2, 3], [1, 2, 3, 9, 5, 1, 2, 3]
    assert chance(agreeing, read=False) == chance(other, read=False) == chance([4, 3], read=True)
    assert chance(other, read=True) < 0.9 * chance(other, read=False)
    assert chance(agreeing, read=True) > 1.1 * chance(agreeing, read=False)


def test_nothing_is_told_of_another_text_than_the_one_that_was_read():
    growth = NativeTree()
    growth.read([1, 2, 3, 1])
    assert growth.grow(Memory().bound, [1, 2, 3, 1, 2], [(5, 0.0)]) == [1.0]
    growth.read([1, 2, 3, 1, 2])
    growth.grow(Memory().bound, [1, 2, 3, 1, 2], [(5, 0.0)])
    assert growth.paths(2)[1] == (3,)


def test_how_far_earlier_places_are_to_be_trusted_is_learned():
    growth, text = NativeTree(), [1, 2, 3]
    for end in range(60):
        text = [*text, 1, 2]  # never followed by what followed it before
        growth.read(text)
        growth.start(text)
        growth.extend(TokenTree(2), 1)
        text = [*text, 50 + end]
        Memory().learn_tree(growth, rows_of([{text[-1]: 255}]), [ROOT], text[-1:])
    learned, prior = Tree(growth).copy_weights, Tree(NativeTree()).copy_weights
    assert (learned[:, COPY_KINDS] < prior[:, COPY_KINDS]).any()
    assert (learned[-1] == prior[-1]).all(), "no end was so long"


def told_set(text: list[int], prompt: int, growth: NativeTree) -> int:
    """Which of the four sets of weights is in use behind a text."""
    growth.set_prompt(prompt)
    growth.read(text)
    growth.grow(Memory().bound, text, [(2, 0.0)])
    parts = Tree(growth)
    return int(parts.copy_line[0]) // (len(parts.copy_weights) // 4)


def test_places_of_the_prompt_and_texts_that_are_copied_have_weights_of_their_own():
    growth, prompt = NativeTree(), list(range(100, 140))
    text = [*prompt, 7, 100]
    assert told_set(text, 40, growth) == 0
    assert told_set(text, 0, NativeTree()) == 1, "the place is in the answer"
    assert told_set([*prompt, *prompt[:15]], 40, growth) == 0
    text = [*prompt, *prompt[:16]]
    assert told_set(text, 40, growth) == 2
    assert told_set(text, 10, NativeTree()) == 3
    text += range(300, 362)
    assert told_set([*text, 130], 40, growth) == 2, "63 tokens further it is still likely"
    assert told_set([*text, 362, 130], 40, growth) == 0


def test_the_prompt_is_known_where_an_encoder_has_read_another_text_before_it():
    drafter = drafter_for(LookaheadConfig(budget=4))
    drafter.begin([50, 51, 52, 1, 2, 3, 4], 6)
    drafter.draft([1, 2, 3, 4], None)
    assert Tree(drafter._tree).prompt == 3
    drafter.draft([1, 2, 3, 4, 5, 6], None)
    assert Tree(drafter._tree).prompt == 3


def quotes() -> tuple[list[int], list[int]]:
    """A prompt, and an answer that quotes from it, a few tokens at a time."""
    rng = random.Random(0)
    prompt = rng.choices(range(10, 150), k=600)
    starts = [rng.randrange(580) for _ in range(40)]
    return prompt, [
        token for start in starts for token in (*rng.sample(range(10, 150), 2), *prompt[start : start + 12])
    ]


def tokens_per_step(prompt: list[int], answer: list[int]) -> float:
    text, drafter = [*prompt, *answer], drafter_for(LookaheadConfig(budget=12))
    tokens, _, stats = written(prompt, len(text), drafter, FunctionRunner(writer_of(text, 150), 150))
    assert tokens == text
    return stats.tokens_per_step


def test_short_quotes_are_drafted_from_their_first_tokens_on(monkeypatch):
    ours = tokens_per_step(*quotes())
    reads_no_places(monkeypatch)
    assert ours > 1.04 * tokens_per_step(*quotes())


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@settings(max_examples=examples(10), deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.sampled_from([2, 9, 40]))
def test_texts_that_repeat_are_those_of_plain_generation(dtype, prompt, budget):
    model, ids = toy_model("llama", vocabulary=6, dtype=dtype), torch.tensor([prompt])
    ours = lade.generate(model, input_ids=ids, max_new_tokens=60, lookahead=LookaheadConfig(budget=budget))
    assert torch.equal(ours, model.generate(input_ids=ids, max_new_tokens=60))


BEFORE = [1, 2, 3]
SURE = 250


def step(growth: NativeTree, memory: Memory, text: list[int], branch: list[int], said: list[int]) -> None:
    """Feed a branch below the end of a text, at whose nodes, the root first, the model says these tokens."""
    tree = TokenTree(text[-1])
    growth.start(text)
    tree.add_path(branch, "pool")
    growth.extend(tree, 1)
    memory.learn_tree(growth, rows_of([{token: SURE} for token in said]), [ROOT], said[:1])


def proposed(growth: NativeTree, memory: Memory, text: list[int]) -> list[list[int]]:
    """The paths of the likeliest nodes."""
    return [list(path) for path in growth.paths(len(growth.grow(memory.bound, text, [(4, 0.0)])))[1:]]


def test_what_was_said_at_a_rejected_token_is_proposed_at_its_place_and_counts_more_at_the_same_token():
    growth = NativeTree()
    step(growth, Memory(), BEFORE, [7], [8, 9])  # 7 was guessed, 8 was right; behind 7 the model said 9
    assert proposed(growth, Memory(), [*BEFORE, 8]) == [[9]]
    assert proposed(NativeTree(), Memory(), [*BEFORE, 8]) == []
    assert proposed(growth, Memory(), [*BEFORE, 8, 5]) == [], "another place"
    growth = NativeTree()
    step(growth, Memory(), BEFORE, [7, 4], [8, 5, 6])
    step(growth, Memory(), BEFORE, [8, 4], [8, 9, 6])
    step(growth, Memory(), BEFORE, [7, 4], [8, 5, 6])
    assert proposed(growth, Memory(), [*BEFORE, 8])[0] == [9]
    assert proposed(growth, Memory(), [*BEFORE, 7])[0] == [5]


def test_how_far_notes_are_to_be_trusted_is_learned():
    growth, memory = NativeTree(), Memory()
    for end in range(60):
        step(growth, Memory(), [*BEFORE, *[50] * end], [7], [8, 9])
        step(growth, memory, [*BEFORE, *[50] * end, 8], [], [end])  # never what the note said
    learned, prior = Tree(growth).note_weights, Tree(NativeTree()).note_weights
    assert (learned[1:, NOTE_KINDS] < prior[1:, NOTE_KINDS]).any()
    assert (learned[0] == 0.0).all()
