"""The adaptive method's drafter: it feeds trees from a memory and learns from every row."""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from memories import (
    downhill,
    filled_memory,
    is_undecided,
    known,
    learns_slowly,
    likeliest,
    mixed,
    reads_no_places,
    said_of,
)
from random_texts import VOCABULARY, Fixed, Follow, depths, follow_of, path_to, seeds, texts
from reference.tree import parts_of

import lade
from lade import LookaheadConfig, Memory, Stats
from lade.decoding.drafting.adaptive import LEAST_COLUMNS, NGRAM, AdaptiveDrafter
from lade.decoding.drafting.controller import FixedBudget
from lade.decoding.drafting.drafter import Draft, Guess
from lade.decoding.kernels.layout import ORDERS, TEXT_ORDERS
from lade.decoding.readout import read
from lade.decoding.tree import TokenTree
from lade.decoding.verify import Verdict, walk
from lade.testing import toy_model


class SetBudget:
    """Does what a test says; remembers what it was told."""

    def __init__(self, grown: int, chosen: int, filled: int, resting: Sequence[bool] = ()) -> None:
        self.grown, self.chosen, self.most, self.resting = grown, chosen, filled, list(resting)

    def stages(self) -> list[tuple[int, float]]:
        return [(self.grown // 2 + 1, 0.0), (self.grown, 1e-6)]

    def choose(self, scores: Sequence[float]) -> int:
        return min(self.chosen, len(scores))

    def worth_verifying(self, scores: Sequence[float]) -> bool:
        return sum(scores) > 1.0

    def fill_size(self, size: int) -> int:
        return max(size, self.most)

    def learn(self, scores: Sequence[float], accepted: Sequence[int]) -> None:
        assert len(scores) <= self.chosen and all(0 < rank < len(scores) for rank in accepted)

    def skip_drafting(self) -> bool:
        return self.resting.pop(0) if self.resting else False


def drafter_of(
    memory: Memory, budget: object, prompt: Sequence[int], seed: int = 0, **arguments: object
) -> AdaptiveDrafter:
    drafter = AdaptiveDrafter(LookaheadConfig(memory=memory, seed=seed), budget, **arguments)
    drafter.begin(prompt, len(prompt))
    return drafter


def logits_of(tree: TokenTree, text: list[int], follow: Follow, vocabulary: int = VOCABULARY) -> torch.Tensor:
    logits = torch.zeros(len(tree), vocabulary)
    for node in range(len(tree)):
        logits[node, follow(text + path_to(tree, node))] = 9.0
    return logits


def step(
    drafter: AdaptiveDrafter,
    text: list[int],
    follow: Follow,
    max_depth: int | None = None,
    vocabulary: int = VOCABULARY,
) -> tuple[Draft, Verdict]:
    """One step as the loop makes it; `text` grows."""
    draft = drafter.draft(text, max_depth)
    readout = read(logits_of(draft.tree, text, follow, vocabulary), wants_entries=draft.wants_entries)
    verdict = walk(draft.tree, readout.argmax_ids.__getitem__, lambda token: text.append(token) or False)
    drafter.learn(text, draft, readout, verdict)
    return draft, verdict


def cells(tree: TokenTree) -> int:
    return tree.sources.count("window")


@given(seeds, texts, st.integers(1, 60), st.integers(1, 3), depths)
def test_no_tree_is_larger_than_its_budget(seed, prompt, size, order, max_depth):
    """Nor deeper than allowed, whatever the memory knows and however full the window is."""
    drafter = drafter_of(filled_memory(seed), FixedBudget(size), prompt)
    text = list(prompt)
    for _ in range(12):
        tree = step(drafter, text, follow_of(order, seed), max_depth)[0].tree
        assert len(tree) <= size
        assert max_depth is None or max(tree.depths) <= max_depth
        guesses = tree.sources.count("memory")
        assert cells(tree) <= max(0, size - 1 - guesses) // (NGRAM - 1) * (NGRAM - 1), "only what the memory leaves"


def test_the_window_gets_what_the_memory_leaves():
    """At first that is all; when the text has come round again and again, nothing."""
    text = [0]
    drafter = drafter_of(Memory(), FixedBudget(24), text)
    shares = []
    for _ in range(60):
        parts_of(drafter._tree)["notes"]["place"] = -1  # of places; they would leave nothing from the second step on
        shares.append(cells(step(drafter, text, lambda text: (text[-1] + 1) % VOCABULARY)[0].tree))
    assert shares[0] > 0 == shares[-1]
    assert max(shares) >= (LEAST_COLUMNS - 1) * (NGRAM - 1)


def test_a_window_finds_what_no_memory_knows():
    """Guesses of the window are accepted, as those of any other source."""
    rng = random.Random(0)
    table = {n: rng.randrange(40) for n in range(40)}
    text, accepted = [0], 0
    drafter = drafter_of(Memory(), SetBudget(1, 1, 80), text)
    for _ in range(30):
        _, verdict = step(drafter, text, lambda text: table[text[-1]], vocabulary=40)
        accepted += verdict.sources.count("window")
    assert accepted > 10


@given(seeds, texts, st.integers(1, 30), st.integers(1, 30), st.integers(1, 60), st.integers(1, 3), depths)
def test_after_a_step_what_follows_each_of_its_nodes_is_known(seed, prompt, grown, chosen, filled, order, max_depth):
    """Under the ends of the node's own text, however much was cut off before the window was planted."""
    follow = follow_of(order, seed)
    drafter = drafter_of(filled_memory(seed), SetBudget(grown, chosen, filled), prompt)
    drafter.memory = memory = Memory()  # what was known serves the first tree only
    text = list(prompt)
    for number in range(4):
        if number == 0:
            drafter.memory = filled_memory(seed)
        before = list(text)
        draft, verdict = step(drafter, text, follow, max_depth)
        tree = draft.tree
        for node in range(len(tree)):
            full = before + path_to(tree, node)
            rows = drafter.memory.lookup(full)[0]
            assert len(rows) == len(ORDERS)
            if number:
                assert likeliest(rows[-1]) == follow(full)
        for end in range(len(before), len(text)):
            followed = known(drafter.memory, text[:end])[1]
            assert len(followed) == len(TEXT_ORDERS)
        assert all(row[verdict.tokens[-1]] >= 127 for row in followed), "what came last counts most"
        drafter.memory = memory


@given(seeds, texts, st.integers(1, 30), st.integers(1, 40))
def test_weights_are_learned_from_the_rows_of_the_nodes_that_were_reached(seed, prompt, chosen, filled):
    """As the memory knew them before, and from no others, such as those of nodes that were cut off."""
    memory = filled_memory(seed)
    drafter = drafter_of(memory, SetBudget(30, chosen, filled), prompt)
    text, follow = list(prompt), follow_of(1, seed)
    with pytest.MonkeyPatch.context() as patch:
        rate = learns_slowly(patch)
        reads_no_places(patch)
        for _ in range(6):
            before, weights = list(text), memory.weights.copy()
            parts_of(drafter._tree)["notes"]["place"] = -1  # nothing is noted of any place: what notes say is added
            draft = drafter.draft(text, None)
            readout = read(logits_of(draft.tree, text, follow))
            verdict = walk(draft.tree, readout.argmax_ids.__getitem__, lambda token: text.append(token) or False)
            expected = np.zeros_like(weights)
            for end, token in enumerate(verdict.tokens, start=len(before)):
                said = said_of(memory, text[:end])
                assume(not is_undecided(weights, said))
                expected += downhill(weights, said, token)
            drafter.learn(text, draft, readout, verdict)
            assert (memory.weights - weights) / rate == pytest.approx(expected, abs=1e-3)


@given(seeds, texts, st.sets(st.integers(0, 20)), st.integers(1, 20))
def test_ids_that_are_excluded_or_not_in_the_vocabulary_are_never_drafted(seed, prompt, excluded, vocabulary):
    """The window is left out: its cells are the model's own choices and the prompt's."""
    memory = filled_memory(seed, vocabulary=20, texts=60)
    drafter = drafter_of(memory, SetBudget(60, 60, 1), prompt, excluded=excluded, vocabulary=vocabulary)
    tree = drafter.draft(prompt, None).tree
    assert all(token < vocabulary and token not in excluded for token in tree.ids[1:])
    allowed = {token for token in mixed(memory.weights, said_of(memory, prompt)) if token < vocabulary} - excluded
    assert len(tree) >= min(60, 1 + len(allowed)), "others are drafted all the same"


def test_a_resting_step_feeds_one_token_and_asks_for_nothing():
    resting = [False, True, True, False, True, False]
    memory, text = filled_memory(0, texts=100), [1, 2, 3]
    budget = SetBudget(20, 20, 40, resting)
    drafter = drafter_of(memory, budget, text)
    for rests in resting:
        known, rows = len(memory), [list(row) for row in drafter.window.rows]
        draft, verdict = step(drafter, text, follow_of(1, 0))
        assert (len(draft.tree) == 1) == rests == (not draft.wants_entries)
        if rests:
            assert len(verdict.tokens) == 1
            assert (len(memory), drafter.window.rows) == (known, rows)


@pytest.mark.parametrize(("scores", "fed"), [([0.4, 0.3, 0.2], 0), ([0.9, 0.8, 0.7], 3), ((), 3)])
def test_a_resting_step_feeds_a_guess_that_pays_by_itself_and_nothing_of_the_memory(scores, fed):
    """And one of which nothing is known."""
    memory, text, other = filled_memory(0, texts=100), [1, 2, 3], Fixed(Guess([21, 22, 23], "other", scores))
    drafter = drafter_of(memory, SetBudget(20, 20, 4, [True]), text, sources=[other])
    tree = drafter.draft([*text, 4], None).tree
    assert tree.sources[1:] == ["other"] * fed
    awake = drafter_of(memory, SetBudget(20, 20, 20), text, sources=[other])
    assert "memory" in awake.draft([*text, 4], None).tree.sources, "or else this shows nothing"


def test_what_the_model_says_to_the_prompt_is_kept_under_the_prompts_ends():
    memory, prompt = Memory(), [3, 1, 4, 1, 5]
    drafter = AdaptiveDrafter(LookaheadConfig(memory=memory, budget=8))
    entries = read(torch.eye(VOCABULARY)[[6, 2, 7]]).entries
    drafter.learn_prompt(prompt, 2, entries)  # after 4, 1 and 5
    for end, token in ((3, 6), (4, 2), (5, 7)):
        rows, followed = memory.lookup(prompt[:end])
        assert len(rows) == len(ORDERS) and likeliest(rows[-1]) == token and len(followed) == 0
    assert known(memory, [3]) == ([], [])


@pytest.mark.parametrize("reads", [True, False])
def test_what_followed_in_the_prompt_is_kept_if_it_may_be_read(reads):
    memory, prompt = Memory(), [3, 1, 4, 1, 5]
    drafter = AdaptiveDrafter(LookaheadConfig(memory=memory, budget=8, prompt_ngrams=reads))
    assert drafter.wants_prompt_entries is reads
    drafter.begin([*prompt, 9], len(prompt))
    for end, token in enumerate([1, 4, 1, 5, 9], start=1):
        assert known(memory, prompt[:end]) == ([], [{token: 255}] * len(TEXT_ORDERS) if reads else [])
    assert known(memory, [*prompt, 9]) == ([], [])


def test_threads_may_draft_from_one_memory():
    """Each from its own tree, while the memory grows, forgets and learns."""
    memory = Memory(30_000)

    def work(seed: int) -> None:
        drafter, text, follow = drafter_of(memory, FixedBudget(24), [seed, 1]), [seed, 1], follow_of(3, seed)
        for _ in range(60):
            draft, verdict = step(drafter, text, follow)
            assert len(draft.tree) <= 24 and len(verdict.tokens) >= 1
        assert text[2:] == [follow(text[:end]) for end in range(2, len(text))]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [None] * 4
    assert np.isfinite(memory.weights).all()


IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.mark.parametrize("reads", [True, False])
def test_prompts_are_read_only_if_they_may_be(model, reads):
    memory = Memory()
    lade.generate(model, input_ids=IDS, max_new_tokens=1, lookahead=LookaheadConfig(memory=memory, prompt_ngrams=reads))
    assert (len(memory) > 0) is reads
    assert [len(rows) for rows in memory.lookup([1, 2])] == ([len(ORDERS), len(TEXT_ORDERS)] if reads else [0, 0])


def test_a_seed_changes_the_window_and_not_the_text(model):
    plain = model.generate(IDS, max_new_tokens=60)
    for seed in range(4):
        config = LookaheadConfig(budget=40, seed=seed)
        assert torch.equal(lade.generate(model, input_ids=IDS, max_new_tokens=60, lookahead=config), plain)
    windows = [drafter_of(Memory(), FixedBudget(40), IDS[0].tolist(), seed=seed).window.rows for seed in (0, 0, 1)]
    assert windows[0] == windows[1] != windows[2]


def test_a_memory_may_be_of_a_model_that_knows_more_tokens(model):
    """Its tokens must not be fed to a model that has no embeddings for them."""
    memory = Memory()
    larger = toy_model(vocabulary=90, seed=1)
    config = LookaheadConfig(memory=memory, budget=32)
    lade.generate(larger, input_ids=IDS, max_new_tokens=200, lookahead=config)
    foreign = {other for token in range(48) for row in known(memory, [token])[0] for other in row}
    assert max(foreign) >= 48, "or else nothing is tested"
    stats = Stats()
    ours = lade.generate(model, input_ids=IDS, max_new_tokens=120, lookahead=config, stats=stats)
    assert torch.equal(ours, model.generate(IDS, max_new_tokens=120))
    assert max(stats.step_tokens) > 1
