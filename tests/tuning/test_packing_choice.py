"""Packing by itself: only where passes were measured both ways, and no text gets slower."""

from functools import partial

import pytest
import torch

from lade.backends.cpu.packing import pack as packing
from lade.decoding.drafting.step_cost import StepCost
from lade.testing import toy_model
from lade.tuning import packing_choice
from lade.tuning.packing_choice import pack_if_it_pays, pays


def cost(one, eight):
    return StepCost.of({1: [1e-3 * one], 8: [1e-3 * eight], 128: [1e-1]})


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((10, 20), (8, 9), True),
        ((10, 20), (10.1, 11), True),  # a lone token gains nothing, guesses do
        ((10, 20), (12, 13), False),  # what cannot be guessed would be slower
        ((10, 12), (9, 14), False),
        ((10, 12), (10, 12), False),
    ],
)
def test_it_pays_where_few_tokens_get_faster_and_one_no_slower(before, after, expected):
    assert pays(cost(*before), cost(*after)) is expected


@pytest.mark.parametrize("packed_ms", [5.0, 20.0])
def test_a_model_is_packed_or_stays_what_it_was(packed_ms, monkeypatch):
    model, measured = toy_model("llama", dtype=torch.float32), []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def measure(model, runner):
        measured.append(packing.packed_layers(model) > 0)
        return cost(packed_ms, packed_ms) if measured[-1] else cost(10, 12)

    for name in ("pack", "packable"):
        monkeypatch.setattr(packing, name, partial(getattr(packing, name), min_weights=1))
    monkeypatch.setattr(packing_choice, "step_cost_for", measure)
    reason = pack_if_it_pays(model)
    assert measured == [False, True]
    assert (reason is None) == (packing.packed_layers(model) > 0) == (packed_ms < 10)
    assert reason is None or reason.endswith("8 tokens 12.0 ms, packed 20.0")
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_what_cannot_be_packed_or_measured_stays_as_it_is(cache_folder):
    before = set(cache_folder.iterdir())
    small = toy_model("llama", dtype=torch.float32)
    assert pack_if_it_pays(small) == "its layers are small"
    assert "float64" in pack_if_it_pays(toy_model("llama", vocabulary=8192, positions=32))
    assert set(cache_folder.iterdir()) == before
