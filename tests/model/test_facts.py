"""One look over a model's modules sees what each asker would see for itself."""

from functools import partial

import torch
from spies import watched
from torch import nn

import lade
from lade.backends.recurrent.backend import CORES
from lade.backends.trials import backend as trials
from lade.backends.trials.backend import foreign_layers
from lade.model.facts import RECURRENT_FUNCTIONS, ModelFacts
from lade.model.supports import support_by
from lade.testing import toy_model


class Handing(nn.Module):
    """A wrapper that has the attributes of what it wraps."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def parts():
    """A model whose modules are shared, missing, wrapped, and in a ring."""
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.ModuleList([shared, nn.Dropout()]), Handing(nn.Linear(3, 3)), nn.Identity())
    model.register_module("none", None)
    model[3].ring = model
    return model


def test_it_finds_each_module_once():
    model = parts()
    survey = ModelFacts.of(model)
    assert len(survey.modules) == len(set(survey.modules)) and set(survey.modules) == set(model.modules())
    assert sorted(map(id, survey.modules)) == sorted(id(each) for kind in survey.kinds.values() for each in kind)
    assert all(type(each) is kind for kind, several in survey.kinds.items() for each in several)
    assert {*map(id, survey.weights)} == {*map(id, model.parameters())} and len(survey.weights) == 4


def test_it_sees_hooks_forwards_and_modes():
    model = toy_model("llama")
    bare, layers = ModelFacts.of(model), model.model.layers
    assert not bare.hooked and not bare.replaced and not bare.training
    layers[0].mlp.register_forward_hook(print)
    layers[1].mlp.register_forward_pre_hook(print)
    layers[0].self_attn.forward = layers[0].self_attn.forward
    layers[1].self_attn._old_forward = print
    layers[1].input_layernorm.training = True
    survey = ModelFacts.of(model)
    assert survey.hooked == [layers[0].mlp, layers[1].mlp]
    assert survey.replaced == [layers[0].self_attn, layers[1].self_attn]
    assert survey.training and not bare.hooked, "a survey stays as it was"


def test_what_has_an_attribute():
    model = parts()
    model[3].in_features = 7
    for name in ("in_features", "p", "forward", "unheard_of"):
        expected = {module for module in model.modules() if hasattr(module, name)}
        assert set(ModelFacts.of(model).having(name)) == expected, name


def noted(looked, foreign, model, *_):
    """In place of `foreign_layers`, once they are known."""
    looked.append(model)
    return iter(foreign)


def test_a_glance_and_the_look_at_each_layer_agree(monkeypatch):
    """`linear_refusal` skips the look at each layer where a glance shows nothing foreign."""

    def changed(change):
        model = toy_model("llama", dtype=torch.float32)
        change(model.model.layers[0].mlp)
        return model

    def int8(mlp):
        mlp.up_proj.weight = nn.Parameter(torch.ones(48, 32, dtype=torch.int8), requires_grad=False)

    def bare_weight(mlp):
        weight = mlp.up_proj.weight
        del mlp.up_proj.weight
        mlp.up_proj.weight = weight.detach()

    def of_another_make(mlp):
        class Linear(nn.Linear):
            pass

        mlp.up_proj.__class__ = Linear

    def without_features(mlp):
        class Linear(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(48, 32, dtype=torch.int8), requires_grad=False)

            def forward(self, rows):
                return rows @ self.weight.T.to(rows.dtype)

        mlp.up_proj = Linear()

    def forward(mlp):
        mlp.up_proj.forward = lambda rows: rows.round() @ mlp.up_proj.weight.T

    changes = [lambda mlp: None, int8, bare_weight, of_another_make, without_features, forward]
    for change in changes:
        model = changed(change)
        foreign = list(foreign_layers(model, type(model).__module__))
        assert bool(foreign) == (change not in (changes[0], bare_weight)), change
        looked = list[nn.Module]()
        monkeypatch.setattr(trials, "foreign_layers", partial(noted, looked, foreign))
        support_by(ModelFacts.of(model), model)
        monkeypatch.undo()
        assert bool(looked) == (change is not changes[0]), change


def test_a_call_looks_at_its_model_once(monkeypatch):
    model, ids = toy_model("llama"), torch.tensor([[5, 6, 7]])
    looks = watched(monkeypatch, ModelFacts, "of", lambda model: model)
    for arguments in ({}, {"do_sample": True}, {"num_beams": 2}, {"input_ids": ids.repeat(2, 1)}):
        looks.clear()
        lade.generate(model, **{"input_ids": ids, "max_new_tokens": 5, **arguments})
        assert looks == [model], arguments


def test_facts_name_the_functions_that_recurrent_layers_replace():
    assert set(CORES) == set(RECURRENT_FUNCTIONS)
