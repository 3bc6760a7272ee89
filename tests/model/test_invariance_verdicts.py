"""What trials of invariance found is kept, for models of one structure on one machine, and only for these."""

import json

import pytest
import torch
from pretend import short_trials, use_threads
from small_models import small_model
from spies import watched
from torch import nn

import lade
from lade.backends.cpu.invariant import make_invariant, trials, weights
from lade.backends.cpu.invariant.trials import distinct_layers
from lade.backends.cpu.invariant.weights import NO_PADDING, RowPadding, padding_of
from lade.backends.cpu.packing.panel_products import panel_for
from lade.errors import UnsupportedModelError
from lade.testing import toy_model

pytestmark = [pytest.mark.by_processor, pytest.mark.usefixtures("rounds_alike")]
HALF = torch.bfloat16


@pytest.fixture
def records(own_cache):
    return own_cache / "invariant"


@pytest.fixture
def tried(monkeypatch):
    """Products whose padding was found by a trial, and lengths of the texts that models were tried on."""
    products = watched(monkeypatch, weights, "padding_for", lambda *given: given[1])
    return products, watched(monkeypatch, trials, "ModelTrial", lambda *given: given[2])


def paddings(model):
    return [padding_of(module) for module in model.modules()]


def test_a_second_model_of_the_structure_gets_the_paddings_of_the_first_after_one_short_trial(records, tried):
    products, texts = tried
    first, second = lade.invariant(toy_model(dtype=HALF, seed=1)), None
    assert products and len(texts) > 1 and len(list(records.iterdir())) == 1
    products.clear()
    texts.clear()
    second = lade.invariant(toy_model(dtype=HALF, seed=2))
    assert not products and texts == [make_invariant.BRIEF_TEXT]
    assert paddings(second) == paddings(first)


def another_layer(model):
    model.model.layers[1].mlp.act_fn = nn.ReLU()


def another_class(model):
    model.model.norm.__class__ = type("OwnNorm", (type(model.model.norm),), {"__module__": "elsewhere"})


CHANGES = {
    "layers": another_layer,
    "dtype": lambda model: model.float(),
    "packed": lambda model: lade.pack(model, min_weights=1),
    "hooks": lambda model: model.model.norm.register_forward_hook(lambda *given: None),
    "own class": another_class,
}


def test_whatever_may_change_the_verdict_is_tried_anew(records, tried, monkeypatch):
    short_trials(monkeypatch)
    lade.invariant(toy_model(dtype=HALF))
    for name, change in CHANGES.items():
        tried[0].clear()
        model = toy_model(dtype=HALF)
        change(model)
        lade.invariant(model)
        assert tried[0], name
    tried[0].clear()
    use_threads(monkeypatch, torch.get_num_threads() + 1)
    lade.invariant(toy_model(dtype=HALF))
    assert tried[0]


def test_a_kept_padding_that_is_wrong_here_is_found_by_the_short_trial(records, monkeypatch):
    """As where something changed that is not part of the key."""
    model = toy_model(dtype=HALF)
    key = trials.key_of(model)
    monkeypatch.setattr(weights, "_rounds_alike", lambda *given: True)
    lade.variant(lade.invariant(model))  # what was kept is no padding at all
    (record,) = records.iterdir()
    assert set(map(tuple, json.loads(record.read_text())["paddings"])) == {(1, 1, None)}
    monkeypatch.setattr(weights, "padding_for", lambda *given: pytest.fail("tried"))

    def rounds_by_company(self, x):
        return nn.functional.linear(x, self.weight) * (1 + x.shape[-2] / 64)

    monkeypatch.setattr(nn.Linear, "forward", rounds_by_company)
    with pytest.raises(UnsupportedModelError, match="rounds a token differently"):
        lade.invariant(model)
    assert trials.key_of(model) == key


def test_a_record_of_other_products_is_not_used(records, tried):
    key = trials.key_of(toy_model(dtype=HALF))
    trials.keep_paddings(key, [RowPadding(4, 4)])
    tried[0].clear()
    assert NO_PADDING in paddings(lade.invariant(toy_model(dtype=HALF)))
    assert tried[0]


def test_the_model_is_tried_with_the_first_layers_up_to_the_last_new_kind():
    types = [*["sliding_attention"] * 2, "full_attention", *["sliding_attention"] * 5]
    model = small_model("gemma3_text", num_hidden_layers=8, layer_types=types)
    with distinct_layers(model):
        assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    assert len(model.model.layers) == 8
    model.model.layers[6].mlp.down_proj = nn.Linear(48, 32, bias=True)
    with distinct_layers(model):
        assert len(model.model.layers) == 7


@pytest.mark.skipif(not panel_for(HALF), reason="no own bfloat16 products here")
def test_a_layer_in_panels_is_tried_on_a_few_of_its_panels(monkeypatch):
    layer = lade.pack(nn.Sequential(nn.Linear(64, 5000, dtype=HALF)).eval(), min_weights=1, panels=True)[0]
    assert layer.panel
    (product,) = weights._products(layer, HALF)
    assert product.layer(torch.ones(3, 64, dtype=HALF)).shape == (3, weights._TRIAL_PANELS * layer.panel + 5000 % 16)
    assert weights.padding_for(product.layer, product.features, product.dtype) == NO_PADDING
