"""The choice between oneDNN's and own products of packed bfloat16 layers."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from pretend import torch_threads

import lade
from lade.backends.cpu.packing import pack as packing
from lade.backends.cpu.packing import panel_products
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.cpu.packing.panel_products import panel_for
from lade.testing import toy_model

PANEL = panel_for(torch.bfloat16)
needs_panels = pytest.mark.skipif(not PANEL, reason="no own bfloat16 products here")
SHAPES = Counter({(2048, 2048): 4})
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def next_process():
    panel_products._own_are_faster.cache_clear()


@pytest.fixture
def measured(monkeypatch, own_cache):
    """Shapes that were measured; own products take 0.9 of the time, unless a test says so."""
    found = Measured()
    next_process()
    monkeypatch.setattr(panel_products, "_measured", found)
    monkeypatch.setattr(panel_products, "panel_for", lambda dtype: 16)
    yield found
    next_process()


class Measured(list):
    own = 0.9

    def __call__(self, shapes, panel):
        self.append(shapes)
        return 1.0, self.own


def test_a_choice_is_measured_once_for_shapes_and_threads(measured, own_cache):
    for _ in range(2):
        assert panel_products.faster_panel(SHAPES) == 16
        next_process()
    assert measured == [((2048, 2048, 4),)]
    with torch_threads(torch.get_num_threads() + 1):
        panel_products.faster_panel(SHAPES)
    panel_products.faster_panel(SHAPES + Counter({(64, 64): 1}))
    assert len(measured) == 3 == len(list(own_cache.glob("products/*")))


@pytest.mark.parametrize(("own", "panel"), [(0.94, 16), (0.96, 0)])
def test_own_products_have_to_gain_five_per_cent(measured, own, panel):
    measured.own = own
    assert panel_products.faster_panel(SHAPES) == panel


def test_small_models_are_not_measured(measured):
    assert panel_products.faster_panel(Counter({(2048, 2048): 1})) == 0 == len(measured)


def test_a_very_large_weight_is_timed_in_part_and_counts_as_a_whole(monkeypatch):
    timed = []

    def time(outputs, inputs, copies, panel):
        timed.append((outputs, inputs, copies))
        return float(outputs * inputs * copies), 0.0

    monkeypatch.setattr(panel_products, "_timed", time)
    shapes = ((2**20, 4096, 1), (4096, 4096, 30), (256, 256, 3))
    theirs, _ = panel_products._measured(shapes, 16)
    assert theirs == sum(outputs * inputs * count for outputs, inputs, count in shapes)
    assert all(2 * outputs * inputs * copies <= panel_products._TRIAL_BYTES for outputs, inputs, copies in timed)


@needs_panels
def test_both_products_are_timed(monkeypatch):
    monkeypatch.setattr(panel_products, "SECONDS", 0)
    assert all(seconds > 0 for seconds in panel_products._timed(64, 64, 2, PANEL))


@pytest.fixture(params=[0, PANEL] if PANEL else [0])
def chosen(request, monkeypatch):
    monkeypatch.setattr(packing, "faster_panel", lambda shapes: request.param)
    return request.param


def panels(model):
    return {module.panel for module in model.modules() if isinstance(module, PackedLinear)}


def test_a_variant_model_has_the_layout_it_was_packed_in(chosen, rounds_alike):
    model = lade.pack(toy_model("llama", dtype=torch.bfloat16), min_weights=1)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert panels(each) == {chosen}
    assert panels(lade.invariant(model)) == {PANEL}
    given = {"input_ids": IDS, "max_new_tokens": 20, "do_sample": False}
    found = lade.generate(model, lookahead=lade.LookaheadConfig(budget=16), **given)
    assert torch.equal(found, model.generate(**given))
    assert panels(lade.variant(model)) == {chosen}


def test_other_dtypes_have_no_choice(monkeypatch):
    asked = []
    monkeypatch.setattr(packing, "faster_panel", lambda shapes: asked.append(shapes) or PANEL)
    assert panels(lade.pack(toy_model("llama", dtype=torch.float32), min_weights=1)) == {0}
    assert asked == [Counter()]
