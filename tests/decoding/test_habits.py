"""What outlasts a text: tolls that are certain, and scores that are held to their promises."""

import pytest

from lade.decoding.drafting.habits import Habits


def test_a_toll_is_believed_once_it_is_certain():
    habits = Habits()
    for _ in range(40):
        habits.plain.add(1.0)
        habits.guessing.add(1.5)
    assert habits.toll == pytest.approx(1.5, rel=0.05)


def test_what_plain_passes_suffer_as_well_is_no_toll():
    habits = Habits()
    for number in range(120):
        stalled = 20.0 if number % 20 == 7 else 1.0
        habits.plain.add(stalled)
        habits.guessing.add(stalled)
    assert habits.toll == 1.0


def test_a_few_stalls_are_no_toll_and_many_are():
    habits = Habits()
    for number in range(100):
        habits.plain.add(1.0)
        habits.guessing.add(6.0 if number in (3, 50) else 1.0)
    assert habits.toll == 1.0
    for number in range(120):
        habits.guessing.add(6.0 if number % 4 == 0 else 1.0)
    assert 1.6 < habits.toll < 2.3


def test_scores_that_promise_too_much_are_trusted_less_and_never_more_than_they_say():
    habits = Habits()
    for _ in range(30):
        habits.learn_yield(2.0, 0.5)
    assert habits.trust == pytest.approx(0.25, rel=0.1)
    for _ in range(30):
        habits.learn_yield(1.0, 3.0)
    assert habits.trust == 1.0


def test_trust_never_ends():
    habits = Habits()
    for _ in range(300):
        habits.learn_yield(3.0, 0.0)
    assert habits.trust > 0.0
