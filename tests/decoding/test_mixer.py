"""The mixer: sums of weighted log-odds, learned until they say how often a guess is right."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memories import NEGLIGIBLE, CachedLogits, Row, downhill, line_of, memory_saying, mixed, probability, rows_of
from reference.tree import parts_of

from lade.decoding.drafting.memory import RATE, ContextMemory, MtpWeights, prior_weights
from lade.decoding.kernels.layout import END, MTP_WIDTH, ORDERS, TEXT, TEXT_ORDERS, WEIGHT_SETS, WIDTH, Doubles
from lade.decoding.kernels.native_tree import NativeTree
from lade.decoding.tree import TokenTree
from lade.memory import Memory

CONTEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
tokens, values = st.integers(0, 20), st.integers(0, 255)
rows = st.dictionaries(tokens, values, max_size=WIDTH)
of_logits, of_text = st.lists(rows, max_size=len(ORDERS)), st.lists(rows, max_size=len(TEXT_ORDERS))


def ranked(memory: Memory) -> list[tuple[int, float]]:
    """All tokens that may follow, with their probabilities, as trees have them."""
    growth, tree = NativeTree(), TokenTree(CONTEXT[-1])
    scores = growth.grow(memory.bound, CONTEXT, [(1 + END * WIDTH, -1.0)], max_depth=1)
    growth.copy_to(tree, len(scores))
    return list(zip(tree.ids[1:], scores[1:], strict=True))


def taught(memory: Memory, *chosen: int) -> Doubles:
    """What is added to the weights when the model chooses these tokens in this context."""
    before, growth = memory.weights.copy(), NativeTree()
    for token in chosen:
        growth.start(CONTEXT)
        memory.learn_tree(growth, rows_of([{}]), [0], [token])
    return memory.weights - before


def numbered(of_logits: list[Row], of_text: list[Row]) -> CachedLogits:
    return [*enumerate(of_logits), *enumerate(of_text, TEXT)]


def some_weights(seed: int) -> Doubles:
    return np.random.default_rng(seed).normal(0.2, 0.4, (WEIGHT_SETS, END + 1))


@given(of_logits, of_text, st.integers(0, 99))
def test_ranks_are_sums_of_weighted_log_odds(of_logits, of_text, seed):
    memory, said = memory_saying(CONTEXT, of_logits, of_text), numbered(of_logits, of_text)
    memory.weights = some_weights(seed)
    expected, found = mixed(memory.weights, said), ranked(memory)
    assert dict(found) == pytest.approx({token: probability(odds) for token, odds in expected.items()}, rel=1e-9)
    assert len(found) == len(expected)
    assert [chance for _, chance in found] == sorted((chance for _, chance in found), reverse=True)


def test_no_rows_say_nothing_and_teach_nothing():
    memory = Memory()
    assert ranked(memory) == []
    assert not taught(memory, 3).any()
    assert np.array_equal(memory.weights, prior_weights())


@pytest.mark.parametrize("logits", range(len(ORDERS) + 1))
@pytest.mark.parametrize("text", range(len(TEXT_ORDERS) + 1))
def test_each_number_of_rows_has_weights_of_its_own(logits, text):
    rows = [{1: 200, 2: 100}, {1: 100, 3: 200}]
    said = [rows[i % 2] for i in range(logits)], [rows[i % 2] for i in range(text)]
    changed = taught(memory_saying(CONTEXT, *said), 3) != 0
    kinds = [*range(logits), *range(TEXT, TEXT + text), END] if logits + text else []
    assert sorted(map(tuple, np.argwhere(changed).tolist())) == [(line_of(numbered(*said)), kind) for kind in kinds]


def test_priors_know_which_rows_there_are():
    """No weight for a row that is not there; and where there is none of either kind, nothing but a bias."""
    weights = prior_weights()
    assert weights.shape == (WEIGHT_SETS, END + 1) and weights.dtype == np.float64 and np.isfinite(weights).all()
    for logits in range(len(ORDERS) + 1):
        for text in range(len(TEXT_ORDERS) + 1):
            line = weights[line_of(numbered([{}] * logits, [{}] * text))]
            assert not line[logits:TEXT].any() and not line[TEXT + text : END].any()
            assert line[:logits].any() == (logits > 0) and line[TEXT : TEXT + text].any() == (text > 0)
    weights[:] = 0
    assert prior_weights().any(), "each memory has weights of its own"


@given(of_logits, of_text, st.integers(0, 21), st.integers(0, 99))
def test_learning_is_a_step_down_the_coding_cost(of_logits, of_text, chosen, seed):
    """The weights move as the gradient of the cost by finite differences says, but for negligible tokens."""
    memory, said = memory_saying(CONTEXT, of_logits, of_text), numbered(of_logits, of_text)
    memory.weights = weights = some_weights(seed)
    counted = [token for token, odds in mixed(weights, said).items() if token == chosen or odds >= NEGLIGIBLE]

    def cost() -> float:
        odds = mixed(weights, said)
        return sum(math.log1p(math.exp(-odds[token] if token == chosen else odds[token])) for token in counted)

    gradient, line = np.zeros_like(weights), line_of(said)
    for kind, before in enumerate(weights[line].tolist()):
        weights[line, kind] = before + 1e-5
        above = cost()
        weights[line, kind] = before - 1e-5
        gradient[line, kind] = (above - cost()) / 2e-5
        weights[line, kind] = before
    reference = downhill(weights, said, chosen)
    step = taught(memory, chosen)
    assert step == pytest.approx(-RATE * gradient, abs=1e-6)
    assert step == pytest.approx(RATE * reference, abs=1e-12)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_sums_that_say_more_than_two_rows_do_not_throw_off_the_final_mixing(sign):
    """Sums over many rows reach -100. One step along such a gradient took a weight from -0.3 to 19.6."""
    steps = []
    for odds in (sign * 14.0, sign * 111.0):
        text, memory, weights = [1, 2, 3] * 4, ContextMemory(), MtpWeights()
        before = weights.lines.copy()
        grower, tree = NativeTree([], 12), TokenTree(text[-1])
        grower.use_mtp(weights.lines, weights.trust)
        grower.read(text)
        root = grower.frontier(grower.grow(memory.bound, text, [(8, 0.01)]))
        grower.add_predictions(root, np.arange(MTP_WIDTH, dtype=np.int32)[None], np.full((1, MTP_WIDTH), 0.5))
        grower.copy_to(tree, len(grower.grow(memory.bound, text, [(8, 0.01)])))
        root = parts_of(grower)["nodes"][0]
        root["memory_odds"][: root["listed"]] = odds
        memory.learn_tree(grower, rows_of([{5: 200}] * len(tree)), [0], [5])
        steps.append(weights.lines - before)
    assert np.array_equal(*steps) and np.abs(steps[0]).max() > 0.0
