"""The fallback to plain decoding is reported once per model and reason, wherever the calls stand."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from same_as_plain import unsupported

import lade
from lade.testing import toy_model

IDS = torch.tensor([[1, 2, 1, 2, 1]])
NEW = {"max_new_tokens": 4, "do_sample": False}


@pytest.fixture
def told():
    """The texts of all warnings, in order; Python's own registry of lines is switched off."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(each.message) for each in caught if each.category is lade.FallbackWarning]


def test_a_model_that_is_not_supported_is_reported_once_from_several_lines(told):
    model, stats = unsupported(), [lade.Stats() for _ in range(3)]
    plain = model.generate(IDS, **NEW)
    assert torch.equal(lade.generate(model, IDS, stats=stats[0], **NEW), plain)
    for _ in range(2):
        assert torch.equal(lade.enable(model).generate(IDS, stats=stats[1], **NEW), plain)
    list(lade.stream(model, IDS, stats=stats[2], **NEW))
    (text,) = told()
    assert text.startswith("GPTNeoForCausalLM is not supported, running at normal speed: its local attention layers")
    assert all("local attention" in each.fallback for each in stats), "the reason is recorded at every call"


def test_each_model_is_reported_and_none_is_kept_alive_for_it(told):
    models = [unsupported(), unsupported()]
    for model in [*models, copy.deepcopy(models[0])]:
        lade.generate(model, IDS, **NEW)
    assert len(told()) == 3
    gone = weakref.ref(models.pop())
    del model
    gc.collect()
    assert gone() is None


def test_each_reason_is_reported_once_whatever_its_numbers(told):
    model = toy_model()
    for beams in (2, 3, 2):
        for prompts in (2, 3):
            lade.generate(model, IDS.repeat(prompts, 1), num_beams=beams, **NEW)
    for _ in range(2):
        lade.generate(model, IDS, use_cache=False, **NEW)
    beams, cache = told()
    assert beams.startswith("running at normal speed: num_beams=2 for 2 prompts")
    assert cache.startswith("running at normal speed: use_cache=False")


def test_an_error_made_of_the_warning_is_raised_once():
    model = unsupported()
    with pytest.raises(lade.FallbackWarning, match="GPTNeoForCausalLM is not supported"):
        lade.generate(model, IDS, **NEW)
    assert torch.equal(lade.generate(model, IDS, **NEW), model.generate(IDS, **NEW))
