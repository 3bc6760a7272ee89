"""The mixer: sums of weighted log-odds, learned until they say how often a guess is right."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lade.decoding.contexts import ORDERS, WIDTH, entries_of, row_bytes
from lade.decoding.mixer import PRIORS, Mixer, probability
from lade.decoding.readout import FLOOR, SCALE

Row = dict[int, int]
rows = st.dictionaries(st.integers(0, 20), st.integers(0, 255), max_size=WIDTH)


def packed(row: Row) -> bytes:
    tokens = list(row) + [-1] * (WIDTH - len(row))
    values = list(row.values()) + [0] * (WIDTH - len(row))
    return row_bytes(entries_of(np.array([tokens], dtype=np.int32), np.array([values], dtype=np.uint8)))[0]


def reference(mixer: Mixer, rows: list[Row], token: int) -> float:
    *weights, bias = mixer.weights[len(rows) - 1]
    return bias + sum(w * (FLOOR + SCALE * row.get(token, 0)) for w, row in zip(weights, rows, strict=True))


@given(st.lists(rows, min_size=1, max_size=len(ORDERS)))
def test_ranks_are_sums_of_weighted_log_odds(rows):
    mixer = Mixer()
    ranked = mixer.rank([packed(row) for row in rows])
    assert {token for token, _ in ranked} == {token for row in rows for token in row}
    for token, log_odds in ranked:
        assert log_odds == pytest.approx(reference(mixer, rows, token))
    assert [odds for _, odds in ranked] == sorted((odds for _, odds in ranked), reverse=True)


def test_no_rows_say_nothing():
    mixer = Mixer()
    assert mixer.rank([]) == []
    mixer.learn([], [], 3)
    assert mixer.weights == [list(prior) for prior in PRIORS]


def test_each_number_of_rows_has_weights_of_its_own():
    mixer = Mixer()
    rows = [packed({1: 200, 2: 100}), packed({1: 100, 3: 200})]
    mixer.learn(rows, mixer.rank(rows), 3)
    changed = [weights != list(prior) for weights, prior in zip(mixer.weights, PRIORS, strict=True)]
    assert changed == [False, True, *[False] * (len(ORDERS) - 2)]


@given(st.lists(rows, min_size=1, max_size=len(ORDERS)), st.integers(0, 20))
def test_learning_is_a_step_down_the_coding_cost(rows, chosen):
    """The weights move as the gradient of the cost by finite differences says, where no token is negligible."""
    mixer = Mixer()
    index = len(rows) - 1
    before = list(mixer.weights[index])
    raw = [packed(row) for row in rows]
    ranked = [(token, odds) for token, odds in mixer.rank(raw) if odds > -4.5]

    def cost() -> float:
        total = 0.0
        for token, _ in ranked:
            p = probability(reference(mixer, rows, token))
            total -= math.log(p if token == chosen else 1 - p)
        return total

    gradient = []
    for i in range(len(before)):
        mixer.weights[index][i] = before[i] + 1e-5
        above = cost()
        mixer.weights[index][i] = before[i] - 1e-5
        gradient.append((above - cost()) / 2e-5)
        mixer.weights[index][i] = before[i]
    mixer.learn(raw, ranked, chosen)
    assert mixer.weights[index] == pytest.approx(
        [w - 0.01 * g for w, g in zip(before, gradient, strict=True)], abs=1e-6
    )


def stream(length: int, seed: int) -> list[tuple[list[bytes], int]]:
    """Two rows whose first is noise, whose second says the truth; what follows is drawn from the second."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(length):
        tokens = rng.sample(range(100), WIDTH)
        weights = [rng.expovariate(1.0) ** 2 for _ in tokens]
        truth = [w / (sum(weights) + 0.2) for w in weights]
        values = [round(min(max((math.log(p / (1 - p)) - FLOOR) / SCALE, 0), 255)) for p in truth]
        chosen = rng.choices([*tokens, 1000], [*truth, 1 - sum(truth)])[0]
        noise = {token: rng.randrange(256) for token in rng.sample(range(100), WIDTH)}
        drawn.append(([packed(noise), packed(dict(zip(tokens, values, strict=True)))], chosen))
    return drawn


def coding_cost(mixer: Mixer, samples: list[tuple[list[bytes], int]]) -> float:
    cost = 0.0
    for rows, chosen in samples:
        for token, odds in mixer.rank(rows):
            cost -= math.log(probability(odds) if token == chosen else probability(-odds))
    return cost / len(samples)


def test_learning_lowers_the_coding_cost_and_calibrates():
    mixer, tests = Mixer(), stream(1500, seed=1)
    before = coding_cost(mixer, tests)
    for rows, chosen in stream(4000, seed=0):
        mixer.learn(rows, mixer.rank(rows), chosen)
    assert coding_cost(mixer, tests) < 0.85 * before
    noise, truth, _ = mixer.weights[1]
    assert abs(noise) < 0.15 and 0.7 < truth < 1.3

    said, right = np.array(
        [(probability(odds), token == chosen) for rows, chosen in tests for token, odds in mixer.rank(rows)]
    ).T
    for low, high in ((0.02, 0.1), (0.1, 0.3), (0.3, 0.6), (0.6, 1.0)):
        among = (said >= low) & (said < high)
        assert among.sum() > 100
        assert right[among].mean() == pytest.approx(said[among].mean(), abs=0.06)
