"""The adaptive method: trees grown best first, and a drafter that feeds them and learns from every row."""

import random
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lade
from lade import LookaheadConfig, Memory, Stats
from lade.decoding import adaptive as adaptive_module
from lade.decoding.adaptive import LEAST_COLUMNS, NGRAM, PROMISE, AdaptiveDrafter, Growth
from lade.decoding.contexts import BITS, ORDERS, TOKEN, WIDTH, context_of, unpack_row
from lade.decoding.controller import LARGEST, Controller, FixedBudget
from lade.decoding.mixer import probability
from lade.decoding.readout import Readout, read
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import Verdict, walk
from lade.testing import nearly_flat_cost, toy_model

VOCABULARY = 8
Allowed = Callable[[int], bool]
Follow = Callable[[Sequence[int]], int]
seeds = st.integers(0, 10_000)
texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)
depths = st.one_of(st.none(), st.integers(0, 5))


def filled_memory(seed: int, vocabulary: int = VOCABULARY, texts: int = 30) -> Memory:
    """Random rows under the ends of random texts, some of them many times: about half of all contexts are known."""
    memory, rng = Memory(), np.random.default_rng(seed)
    for _ in range(texts):
        text = rng.integers(0, vocabulary, 6).tolist()
        tokens = np.stack([rng.choice(vocabulary, min(WIDTH, vocabulary), replace=False) for _ in text])
        values = -np.sort(-rng.integers(1, 256, tokens.shape))
        contexts = [context_of(text[: end + 1]) for end in range(len(text))]
        memory.learn(contexts, Readout(tokens.astype(np.int32), values.astype(np.uint8)))
    return memory


def path_to(tree: TokenTree, node: int) -> list[int]:
    """Tokens from below the root to a node."""
    path = []
    while node != ROOT:
        path.append(tree.ids[node])
        node = tree.parents[node]
    return path[::-1]


def offers(memory: Memory, text: Sequence[int], allowed: Allowed) -> list[tuple[float, int]]:
    """What may follow a text, with its probability."""
    ranked = memory.mixer.rank(memory.lookup(context_of(text)))
    return [(probability(odds), token) for token, odds in ranked if allowed(token)]


def naive_scores(
    memory: Memory, text: list[int], size: int, least: float, max_depth: int | None, allowed: Allowed
) -> list[float]:
    """Scores of the likeliest nodes: of all continuations that hang from nodes taken already, the best, ever again."""
    taken = [1.0]
    open_ends = [(p, [token]) for p, token in offers(memory, text, allowed) if max_depth != 0]
    while open_ends and len(taken) < size:
        best = max(open_ends)
        open_ends.remove(best)
        score, path = best
        if score <= least:
            break
        taken.append(score)
        if max_depth is None or len(path) < max_depth:
            open_ends += [(score * p, [*path, token]) for p, token in offers(memory, text + path, allowed)]
    return taken


def growth_of(
    memory: Memory, text: Sequence[int], max_depth: int | None = None, allowed: Allowed | None = None
) -> Growth:
    tree = TokenTree(text[-1], max_depth)
    return Growth(tree, context_of(text), memory, memory.mixer, allowed or (lambda token: True))


def check_contexts(growth: Growth, text: list[int]) -> None:
    paths = [path_to(growth.tree, node) for node in range(len(growth.tree))]
    assert growth.contexts == [context_of(text + path) for path in paths]


# ------------------------------------------------------------------------------------------------------------ growth


@given(
    seeds,
    texts,
    st.integers(1, 40),
    st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    depths,
    st.sets(st.integers(0, VOCABULARY)),
)
def test_a_tree_has_the_likeliest_nodes_of_all(seed, text, size, least, max_depth, forbidden):
    """Against a naive search. With a promise of 1.0 the order is exact."""
    memory = filled_memory(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive_module, "PROMISE", 1.0)
        growth = growth_of(memory, text, max_depth, lambda token: token not in forbidden)
        reached = growth.grow(size, least)
    expected = naive_scores(memory, text, size, least, max_depth, lambda token: token not in forbidden)
    assert growth.scores == pytest.approx(expected, rel=1e-9)
    assert reached == (len(expected) == size)


@given(seeds, texts, st.lists(st.tuples(st.integers(1, 40), st.floats(0.0, 0.3)), max_size=4), depths)
def test_nodes_come_in_falling_order_with_their_probabilities(seed, text, stages, max_depth):
    """In any number of stages. A node may come too late by as much as the promise was too low."""
    memory = filled_memory(seed)
    growth = growth_of(memory, text, max_depth)
    tree, scores = growth.tree, growth.scores
    for size, least in stages:
        before = len(tree)
        assert growth.grow(size, least) == (len(tree) >= size)
        assert before <= len(tree) <= max(size, before)
        assert all(score > least for score in scores[before:])
    for node in range(1, len(tree)):
        path = path_to(tree, node)
        known = [offers(memory, text + path[:i], lambda token: True) for i in range(len(path))]
        chances = [{token: chance for chance, token in offered} for offered in known]
        assert scores[node] == pytest.approx(prod(chance[token] for chance, token in zip(chances, path, strict=True)))
        assert tree.parents[node] < node
        assert PROMISE * scores[node] <= min(scores[:node]) + 1e-12
    assert max(tree.depths) <= (max_depth if max_depth is not None else len(tree))
    assert set(tree.sources[1:]) <= {"memory"}
    check_contexts(growth, text)


@given(seeds, texts, st.integers(2, 30), st.integers(1, 30), st.lists(texts, max_size=4))
def test_contexts_are_those_of_the_nodes_after_cutting_and_planting_too(seed, text, size, kept, planted):
    """A node that was cut off and one that was planted later may have the same number."""
    memory = filled_memory(seed)
    growth = growth_of(memory, text)
    growth.grow(size)
    for node in range(len(growth.tree)):
        growth.expanded(node)
    kept = min(kept, len(growth.tree))
    growth.cut(kept)
    assert len(growth.tree) == len(growth.scores) == kept and not growth.grow(kept + 5)
    check_contexts(growth, text)
    for path in planted:
        growth.tree.add_path(path, "window")
    growth.follow_tree()
    check_contexts(growth, text)
    for node, context in enumerate(growth.contexts):
        assert growth.expanded(node)[0] == memory.lookup(context)


def test_nothing_grows_where_nothing_is_known():
    growth = growth_of(Memory(), [1, 2, 3])
    assert not growth.grow(5) and len(growth.tree) == 1
    assert growth.grow(1)


# ------------------------------------------------------------------------------------------------------- the drafter


class SetBudget:
    """Does what a test says; remembers what it was told."""

    def __init__(self, grown: int, chosen: int, explored: int, resting: Sequence[bool] = ()) -> None:
        self.grown, self.chosen, self.most, self.resting = grown, chosen, explored, list(resting)
        self.observed: list[tuple[int, int, float, float]] = []

    def stages(self) -> list[tuple[int, float]]:
        return [(self.grown // 2 + 1, 0.0), (self.grown, 1e-6)]

    def choose(self, scores: Sequence[float]) -> int:
        return min(self.chosen, len(scores))

    def explored(self, size: int) -> int:
        return max(size, self.most)

    def rest(self) -> bool:
        return self.resting.pop(0) if self.resting else False

    def observe(self, fed: int, emitted: int, seconds: float, forward_s: float) -> None:
        self.observed.append((fed, emitted, seconds, forward_s))


def drafter_of(memory: Memory, budget: object, prompt: Sequence[int], **arguments: object) -> AdaptiveDrafter:
    drafter = AdaptiveDrafter(memory, budget, **arguments)
    drafter.begin(prompt, len(prompt))
    return drafter


def follow_of(order: int, salt: int, vocabulary: int = VOCABULARY) -> Follow:
    def follow(text: Sequence[int]) -> int:
        return hash((salt, *text[-order:])) % vocabulary

    return follow


def logits_of(tree: TokenTree, text: list[int], follow: Follow, vocabulary: int = VOCABULARY) -> torch.Tensor:
    logits = torch.zeros(len(tree), vocabulary)
    for node in range(len(tree)):
        logits[node, follow(text + path_to(tree, node))] = 9.0
    return logits


def step(
    drafter: AdaptiveDrafter, text: list[int], follow: Follow, max_depth: int | None = None
) -> tuple[TokenTree, Verdict]:
    """One step as the engine makes it; `text` grows."""
    tree = drafter.grow(text, max_depth)
    picks, readout = read(logits_of(tree, text, follow), WIDTH)

    def emit(token: int) -> bool:
        text.append(token)
        return False

    verdict = walk(tree, picks.__getitem__, emit)
    drafter.learn(text, picks, readout if drafter.width else None, verdict)
    drafter.observe(1e-3, 5e-4)
    return tree, verdict


def cells(tree: TokenTree) -> int:
    return tree.sources.count("window")


@given(seeds, texts, st.integers(1, 60), st.integers(1, 3), depths)
def test_no_tree_is_larger_than_its_budget(seed, prompt, size, order, max_depth):
    """Nor deeper than allowed, whatever the memory knows and however full the window is."""
    drafter = drafter_of(filled_memory(seed), FixedBudget(size), prompt)
    text = list(prompt)
    for _ in range(12):
        tree, _ = step(drafter, text, follow_of(order, seed), max_depth)
        assert len(tree) <= size
        assert max_depth is None or max(tree.depths) <= max_depth
        guesses = tree.sources.count("memory")
        assert cells(tree) <= max(0, size - 1 - guesses) // (NGRAM - 1) * (NGRAM - 1), "only what the memory leaves"


@given(seeds, texts)
def test_no_tree_is_larger_than_the_largest(seed, prompt):
    drafter = drafter_of(filled_memory(seed, texts=200), Controller(nearly_flat_cost()), prompt)
    text = list(prompt)
    assert all(len(step(drafter, text, follow_of(2, seed))[0]) <= LARGEST for _ in range(12))


def test_the_window_gets_what_the_memory_leaves():
    """At first that is all; when the text has come round again and again, nothing."""
    text = [0]
    drafter = drafter_of(Memory(), FixedBudget(24), text)
    shares = [cells(step(drafter, text, lambda text: (text[-1] + 1) % VOCABULARY)[0]) for _ in range(60)]
    assert shares[0] > 0 == shares[-1]
    assert max(shares) >= (LEAST_COLUMNS - 1) * (NGRAM - 1)


def test_a_window_finds_what_no_memory_knows():
    """Guesses of the window are accepted, as those of any other source."""
    rng = random.Random(0)
    table = {n: rng.randrange(40) for n in range(40)}
    text, accepted = [0], 0
    drafter = drafter_of(Memory(), SetBudget(1, 1, 80), text)
    for _ in range(30):
        tree = drafter.grow(text, None)
        picks, readout = read(logits_of(tree, text, lambda text: table[text[-1]], 40), WIDTH)
        verdict = walk(tree, picks.__getitem__, lambda token: text.append(token) or False)
        drafter.learn(text, picks, readout, verdict)
        accepted += verdict.sources.count("window")
    assert accepted > 10


@given(seeds, texts, st.integers(1, 30), st.integers(1, 30), st.integers(1, 60), st.integers(1, 3), depths)
def test_after_a_step_what_follows_each_of_its_nodes_is_known(seed, prompt, grown, chosen, explored, order, max_depth):
    """Under the ends of the node's own text, however much was cut off before the window was planted."""
    follow = follow_of(order, seed)
    drafter = drafter_of(filled_memory(seed), SetBudget(grown, chosen, explored), prompt)
    drafter.memory = memory = Memory()  # what was known serves the first tree only
    text = list(prompt)
    for number in range(4):
        if number == 0:
            drafter.memory = filled_memory(seed)
        before = list(text)
        tree, _ = step(drafter, text, follow, max_depth)
        known = memory if number else drafter.memory
        for node in range(len(tree)):
            full = before + path_to(tree, node)
            rows = known.lookup(context_of(full))
            assert len(rows) == len(ORDERS)
            if number:
                assert max(unpack_row(rows[-1])) & TOKEN == follow(full)
        drafter.memory = memory


@given(seeds, texts, st.integers(1, 30), st.integers(1, 40))
def test_the_mixer_learns_from_the_rows_of_the_nodes_that_were_reached(seed, prompt, chosen, explored):
    """And from no others, such as those of nodes that were cut off and had the same numbers."""
    drafter = drafter_of(filled_memory(seed), SetBudget(30, chosen, explored), prompt)
    text, lessons = list(prompt), []
    drafter.memory.mixer.learn = lambda rows, ranked, chosen: lessons.append((rows, chosen))
    for _ in range(6):
        before, known = list(text), drafter.memory.lookup
        tree = drafter.grow(text, None)
        picks, readout = read(logits_of(tree, text, follow_of(1, seed)), WIDTH)
        verdict = walk(tree, picks.__getitem__, lambda token: text.append(token) or False)
        expected = [(known(context_of(text[: len(before) + i])), token) for i, token in enumerate(verdict.tokens)]
        lessons.clear()
        drafter.learn(text, picks, readout, verdict)
        assert lessons == expected


@given(seeds, texts, st.sets(st.integers(0, 20)), st.integers(1, 20))
def test_ids_that_are_excluded_or_not_in_the_vocabulary_are_never_drafted(seed, prompt, excluded, vocabulary):
    """The window is left out: its cells are the model's own choices and the prompt's."""
    memory = filled_memory(seed, vocabulary=20, texts=60)
    drafter = drafter_of(memory, SetBudget(60, 60, 1), prompt, excluded=excluded, vocabulary=vocabulary)
    tree = drafter.grow(prompt, None)
    assert all(token < vocabulary and token not in excluded for token in tree.ids[1:])
    allowed = [token for _, token in offers(memory, prompt, lambda token: token < vocabulary and token not in excluded)]
    assert len(tree) >= min(60, 1 + len(allowed)), "others are drafted all the same"


def test_a_resting_step_feeds_one_token_and_asks_for_nothing():
    resting = [False, True, True, False, True, False]
    memory, text = filled_memory(0, texts=100), [1, 2, 3]
    budget = SetBudget(20, 20, 40, resting)
    drafter = drafter_of(memory, budget, text)
    for rests in resting:
        known, rows = len(memory), [list(row) for row in drafter.window.rows]
        tree, verdict = step(drafter, text, follow_of(1, 0))
        assert (len(tree) == 1) == rests == (drafter.width == 0)
        assert drafter.width in (0, WIDTH)
        if rests:
            assert len(verdict.tokens) == 1
            assert (len(memory), drafter.window.rows) == (known, rows)
        assert budget.observed[-1] == (len(tree), len(verdict.tokens), 1e-3, 5e-4)


def test_what_the_model_says_to_the_prompt_is_kept_under_the_prompts_ends():
    memory, prompt = Memory(), [3, 1, 4, 1, 5]
    drafter = AdaptiveDrafter(memory, FixedBudget(8))
    says = read(torch.eye(VOCABULARY)[[6, 2, 7]], WIDTH)[1]
    drafter.read_prompt(prompt, 2, says)  # behind 4, 1 and 5
    for end, token in ((3, 6), (4, 2), (5, 7)):
        rows = memory.lookup(context_of(prompt[:end]))
        assert len(rows) == len(ORDERS) and max(unpack_row(rows[-1])) & TOKEN == token
    assert memory.lookup(context_of([3])) == []


# ------------------------------------------------------------------------------------------------- through `generate`

IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.mark.parametrize("reads", [True, False])
def test_prompts_are_read_only_if_they_may_be(model, reads):
    memory = Memory()
    lade.generate(model, input_ids=IDS, max_new_tokens=1, lookahead=LookaheadConfig(memory=memory, prompt_ngrams=reads))
    assert (len(memory) > 0) is reads
    assert (len(memory.lookup(context_of([1, 2]))) == len(ORDERS)) is reads
    assert AdaptiveDrafter(memory, FixedBudget(8), read_prompts=reads).width == (WIDTH if reads else 0)


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
    foreign = {
        entry & TOKEN
        for token in range(48)
        for row in memory.lookup(context_of([token]))
        for entry in unpack_row(row)
        if entry >> BITS and entry & TOKEN != TOKEN
    }
    assert max(foreign) >= 48, "or else nothing is tested"
    stats = Stats()
    ours = lade.generate(model, input_ids=IDS, max_new_tokens=120, lookahead=config, stats=stats)
    assert torch.equal(ours, model.generate(IDS, max_new_tokens=120))
    assert max(stats.step_tokens) > 1
