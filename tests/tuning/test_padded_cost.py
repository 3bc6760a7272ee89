"""Where passes are padded to a few sizes, what lies between costs as much as the next of them."""

import gc

import pytest
import torch
from growing import lower_hull, sized
from inside import buffers_in
from spies import failing, watched

from lade.backends.cuda_graphs.buffers import Buffers, EagerReplay
from lade.backends.cuda_graphs.pool import BufferPool
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.decoding.drafting.controller import LARGEST_SHARED, Controller
from lade.decoding.drafting.step_cost import StepCost
from lade.model.inputs import STEP_SIZES, step_bucket
from lade.model.runner import EagerRunner
from lade.model.supports import supports
from lade.testing import toy_model
from lade.tuning import cost_cache as profile
from lade.tuning.cost_cache import SIZES, StepTimer, key_of, measure_step_cost

STAIRS = {1: 1.0, 8: 1.05, 16: 1.1, 32: 1.25, 64: 1.6, 128: 2.6}


def true_cost(size):
    return 1e-3 * STAIRS.get(step_bucket(size), 2.6 * step_bucket(size) / 128)


def measured(noise=()):
    samples = {size: [true_cost(size)] * 3 for size in SIZES}
    for size, factor in noise:
        samples[size] = [factor * seconds for seconds in samples[size]]
    cost = StepCost.of(samples)
    cost.pad_to(STEP_SIZES)
    return cost


def test_nine_tokens_cost_what_sixteen_cost_and_tell_what_they_cost_and_padding_can_be_taken_back():
    cost = measured()
    for size in range(1, 129):
        assert cost.seconds(size) == pytest.approx(true_cost(size)), size
    assert cost.seconds(256) > cost.seconds(128)
    slow = measured([(2, 3.0), (4, 3.0)])
    assert slow.table == cost.table, "sizes between do not count, whatever was measured of them"
    cost, plain = measured(), StepCost.of({size: [true_cost(size)] * 3 for size in SIZES})
    assert cost.table != plain.table
    cost.pad_to(())
    assert cost.table == plain.table and cost.corners == plain.corners
    assert StepCost.from_json(measured().to_json()).table == plain.table
    tables = []
    for size in (9, 16):
        cost = measured()
        for _ in range(200):
            cost.observe(size, 1.5 * true_cost(16))
        cost.refresh()
        tables.append(cost.table)
    assert tables[0] == tables[1] and tables[0][16] == tables[0][9] > 1.3 * measured().table[16]


@pytest.mark.parametrize("noise", [[], [(2, 0.9), (4, 1.2)], [(4, 0.5)], [(16, 1.3)]])
def test_the_hull_touches_the_ends_of_the_stairs_only(noise):
    cost = measured(noise)
    assert set(cost.corners) <= {*STEP_SIZES, LARGEST_SHARED} and cost.corners[0] == 1
    assert all(low <= high * (1 + 1e-9) for low, high in zip(lower_hull(cost), cost.table, strict=True))
    assert cost.marginals == sorted(cost.marginals)


@pytest.mark.parametrize("sizes", [(1, 5), (8, 16), (8, 1), (1, 1)])
def test_sizes_are_knots(sizes):
    with pytest.raises(ValueError, match="sizes="):
        measured().pad_to(sizes)


def test_a_budget_fills_the_stairs():
    """With good guesses without end the tree ends where a stair ends."""
    controller = Controller(measured())
    for _ in range(60):
        most = controller.stages()[-1][0]
        size = sized(controller, [1.0] + [0.3] * (most - 1))
        controller.observe(size, 1 + round(0.3 * (size - 1)), true_cost(size), true_cost(size))
    assert size in STEP_SIZES


def runner_of(model):
    return GraphRunner(model, supports(model).require(), model.generation_config, BufferPool(EagerReplay))


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_captures_do_not_count_as_passes(batch, monkeypatch):
    model = toy_model(vocabulary=300)
    runner = runner_of(model)
    captures = watched(monkeypatch, BufferPool, "record")
    timer = StepTimer(runner, vocabulary=300, largest=128, cached=100, batch=batch)
    assert len(captures) == len(STEP_SIZES)
    captures.clear()
    assert all(timer(size) > 0 for size in SIZES) and not captures
    assert timer._cache.lengths == [100] * batch
    (entry,) = buffers_in(runner._pool)
    assert not entry.idle
    del timer
    gc.collect()
    assert entry.idle, "who is gone needs no buffers"


def test_a_profile_of_graphs_is_one_of_stairs_and_who_has_measured_gives_back_what_it_took(own_cache):
    model = toy_model(vocabulary=300)
    runner = runner_of(model)
    cost = profile.step_cost_for(model, runner)
    assert cost.table[9] == cost.table[16] and key_of(model, runner)["runner"] == "GraphRunner"
    assert profile.step_cost_for(model, runner) is cost
    runner = runner_of(toy_model(vocabulary=300))
    measure_step_cost(runner, vocabulary=300, cached=50, budget_s=0.05)
    assert [entry.owner for entry in buffers_in(runner._pool)] == [None]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["buffers", "capture"])
def test_where_captures_have_no_memory_the_other_passes_are_measured(where, monkeypatch, own_cache):
    model = toy_model(vocabulary=300)
    runner = runner_of(model)
    with monkeypatch.context() as patch:
        owner, name = (Buffers, "__init__") if where == "buffers" else (BufferPool, "record")
        failing(patch, owner, name, torch.OutOfMemoryError)
        cost = profile.step_cost_for(model, runner)
        assert profile.step_cost_for(model, runner.eager()) is cost
    assert len(list(own_cache.glob("step-cost/*"))) == 1, "and are saved as such"
    assert profile.step_cost_for(model, runner) is not cost
    failing(monkeypatch, EagerRunner, "forward", torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        profile.step_cost_for(model, runner.eager(), batch=2)
