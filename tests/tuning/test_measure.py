"""On fakes: a runner whose passes take a known time on a clock of its own. And that a real model notices nothing."""

import random

import numpy as np
import pytest
import torch
from inside import hooks_of

import lade
from lade.clock import Duration
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.model.supports import supports
from lade.testing import toy_model
from lade.tuning.cost_cache import SIZES, StepTimer, measure_step_cost, samples_of


class KnownRunner:
    """Its passes take `cost(size)` seconds of its own clock; every `busy`-th of them ten times as long."""

    parts = 1
    reader = None

    def __init__(self, cost, *, room=None, busy=0):
        self.cost, self.limit, self.busy = cost, room, busy
        self.now, self.pass_time = 0.0, Duration(123.0, 123.0)
        self.sizes, self.depths = [], []

    def clock(self):
        return self.now

    def host(self, cache, tokens):
        return cache

    def pass_sizes(self, largest):
        return ()

    def eager(self):
        return self

    def tree_cache(self):
        return TreeCache()

    def room(self, cached):
        return None if self.limit is None else max(0, self.limit - cached)

    def prefill(self, rows, cache):
        self.rows = rows
        return torch.zeros(len(rows), 1)

    def forward(self, trees, rows, cache):
        (size,) = {len(tree) for tree in trees}
        assert len(trees) == len(rows)
        assert [tree.ids[0] for tree in trees] == [row[-1] for row in rows]
        self.sizes.append(size)
        self.depths.append(max(trees[0].depths))
        slow = self.busy and len(self.sizes) % self.busy == 0
        seconds = self.cost(size) * (10.0 if slow else 1.0)
        self.pass_time = Duration(seconds, seconds)
        self.now += seconds
        return torch.zeros(len(trees), size, 1)


def knee(size):
    return 1e-3 * max(10.0, 10.0 * size / 16)


def measure(runner, **arguments):
    return measure_step_cost(runner, **{"vocabulary": 1000, "clock": runner.clock, **arguments})


@pytest.mark.parametrize("busy", [0, 7, 3])
def test_it_finds_the_cost(busy):
    runner = KnownRunner(knee, busy=busy)
    cost = measure(runner, budget_s=60.0)
    for size in (*SIZES, 96, 200):
        assert cost.seconds(size) == pytest.approx(knee(size))
    assert cost.corners[1] == 16
    assert runner.pass_time.wall_s == 123.0
    assert runner.sizes == [*SIZES] * 9, "they take turns"


def test_processes_room_and_vocabulary_bound_the_sizes_and_all_rows_of_a_batch_are_fed():
    runner = KnownRunner(knee)
    runner.parts = 2
    assert measure(runner, budget_s=60.0).seconds(256) == pytest.approx(knee(256))
    assert runner.sizes == [*SIZES, 256] * 9
    runner = KnownRunner(knee, room=1)
    cost = measure(runner)
    assert set(runner.sizes) == {1} and cost.seconds(1) == knee(1)
    runner = KnownRunner(knee)
    measure(runner, vocabulary=20, batch=4)
    assert set(runner.sizes) == {1, 2, 4, 8, 16} and len(runner.rows) == 4


@pytest.mark.parametrize("scale", [0.01, 0.1, 1.0, 10.0, 100.0])
def test_it_ends_in_time_but_for_two_sizes(scale):
    runner = KnownRunner(lambda size: scale * knee(size))
    cost = measure(runner)
    assert runner.now <= max(1.0, scale * (knee(1) + knee(8))) * (1 + 1e-9)
    assert {1, 8} <= set(runner.sizes)
    assert cost.seconds(8) == pytest.approx(scale * knee(8))
    assert cost.seconds(256) >= cost.seconds(8)


def test_where_time_is_short_what_is_not_measured_is_not_taken_for_free_and_sizes_that_fit_go_on():
    runner = KnownRunner(lambda size: 1.0)
    cost = measure(runner)
    assert runner.sizes == [1, 8]
    assert cost.seconds(8) == 1.0 and cost.seconds(64) > 2.0
    runner = KnownRunner(lambda size: 0.01 * size)
    measure(runner, budget_s=0.305)
    assert runner.sizes == [1, 8, 2, 4] * 2


def test_samples_come_one_by_one_until_nothing_more_fits():
    now = [0.0]

    def timer(size):
        now[0] += size
        return float(size)

    taken = list(samples_of(timer, [1, 2, 4], budget_s=12.0, rounds=100, clock=lambda: now[0]))
    assert taken == [(1, 1.0), (2, 2.0), (4, 4.0), (1, 1.0), (2, 2.0), (1, 1.0), (1, 1.0)]


def test_trees_have_branches_and_stay_within_the_positions():
    runner = KnownRunner(knee)
    measure(runner)
    assert max(runner.depths) == 7 and runner.depths[runner.sizes.index(128)] == 7
    runner = KnownRunner(knee, room=40)
    timer = StepTimer(runner, vocabulary=1000, largest=64, cached=256)
    timer(64)
    assert timer.cached == 33 and runner.depths == [7]


class WatchedRunner(EagerRunner):
    """Notes the cached tokens that each pass finds."""

    def forward(self, trees, rows, cache):
        self.found.append(list(cache.lengths))
        assert len(rows[0]) == cache.lengths[0] + 1
        logits = super().forward(trees, rows, cache)
        assert torch.isfinite(logits).all()
        return logits


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("family", "batch"), [("llama", 1), ("qwen3", 3), ("gpt2", 1)])
def test_a_model_notices_nothing(family, batch):
    model = toy_model(family, vocabulary=300)
    runner = WatchedRunner(model, supports(model).require(), model.generation_config)
    runner.found = []
    prompt = torch.tensor([[1, 2, 3, 4]])
    mine = TreeCache()
    runner.prefill([[1, 2, 3]], mine)
    kept = [layer.keys.clone() for layer in mine.layers]
    before = lade.generate(model, input_ids=prompt, max_new_tokens=20)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    runner.found.clear()

    cost = measure_step_cost(runner, vocabulary=300, batch=batch, cached=100, budget_s=0.5)

    assert runner.found and all(lengths == [100] * batch for lengths in runner.found)
    assert 0 < cost.seconds(1) <= cost.seconds(128)
    assert torch.equal(torch.get_rng_state(), generators[0]) and random.getstate() == generators[1]
    assert np.random.get_state()[1].tolist() == generators[2]
    assert [module.training for module in model.modules()] == modes
    assert not hooks_of(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert mine.lengths == [3]
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(mine.layers, kept, strict=True))
    assert torch.equal(lade.generate(model, input_ids=prompt, max_new_tokens=20), before)


def test_what_it_has_taken_is_given_back_after_an_error(monkeypatch):
    closed = []
    monkeypatch.setattr(StepTimer, "close", lambda self: closed.append(True))

    def fails(size):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(KnownRunner(fails))
    assert len(closed) == 1
