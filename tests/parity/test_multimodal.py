"""Multimodal models: their prompts of text are decoded with trees; those with images are in `test_images.py`."""

from __future__ import annotations

from typing import Any

import images
import pytest
import torch
from comparing import CONFIGS, PAPER, assert_requests, assert_same, lookahead, plain
from multimodal import GEMMA3, OTHERS, QWEN2_5_VL, REFUSED, USUAL, Multimodal, text

import lade
from lade.model.facts import ModelFacts
from lade.model.prepared import is_unset

CLASSES = [pytest.param(case, id=str(case)) for case in USUAL] + [
    pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in OTHERS
]
KINDS = {"Gemma3": "token_type_ids", "Gemma4": "mm_token_type_ids", "Qwen2_5_VL": "mm_token_type_ids"}


def padded() -> dict[str, torch.Tensor]:
    """A batch of two texts, `[2, 20]`, the second one padded by 9 columns."""
    ids = torch.cat([text(20), torch.cat([torch.zeros(1, 9, dtype=torch.long), text(11, seed=1)], 1)])
    return {"ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("case", CLASSES)
def test_prompts_of_text_are_served(case, watch):
    model, short = case.build(), {"max_new_tokens": 25}
    assert lade.supports(model)
    expected = plain(model, text(20))
    assert len(set(expected[0, 20:].tolist())) > 3, "the text puts nothing to the test"
    stats = assert_same(model, text(20), CONFIGS[:2])
    assert stats.tokens_per_step > 1 and watch.branched and watch.moved
    assert_same(model, text(20), do_sample=True, temperature=0.8, **short)
    if not ModelFacts.of(model).recurrent:
        assert_same(model, text(20), num_beams=3, **short)
    assert_same(model, **padded(), **short)


@pytest.mark.one_in(14)
@pytest.mark.parametrize("case", CLASSES)
def test_requests_of_an_engine_are_plains(case):
    prompts = [text(20), text(7, seed=1), text(13, seed=2)]
    asked = [{"input_ids": ids, "max_new_tokens": 25} for ids in prompts]
    assert_requests(case.build(), asked, max_rows=2, prefill_tokens=5)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", [case for case in USUAL if str(case) in KINDS], ids=str)
def test_a_processors_kinds_of_tokens_are_known_to_be_text(case):
    model, ids = case.build(), text(20)
    kinds = {KINDS[str(case)]: torch.zeros_like(ids)}
    assert torch.equal(plain(model, ids, **kinds), plain(model, ids))
    assert_same(model, ids, [PAPER], **kinds)
    assert_same(model, ids, [PAPER], **{KINDS[str(case)]: torch.ones_like(ids)})


def test_what_is_empty():
    assert all(is_unset(value) for value in (None, {}, [], ()))
    assert not any(is_unset(value) for value in (0, False, "", [None], {"image": None}, torch.empty(0)))


def _given_an_image(case: Multimodal) -> tuple[Any, dict[str, Any], torch.Tensor]:
    model, arguments = case.build(), {**images.prompt(case), "max_new_tokens": 30, "do_sample": False}
    return model, arguments, model.generate(**arguments)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("case", "reason"), [pytest.param(*it, id=str(it[0])) for it in REFUSED])
def test_an_image_for_a_model_that_is_refused_is_not_even_encoded(case, reason):
    model = case.build()
    assert reason in lade.supports(model).reason, "which has looked at it once, and needs no more passes"
    passes: list[int] = []
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: passes.append(1))
    arguments: dict[str, Any] = {"input_ids": text(20), "pixel_values": torch.zeros(1, 3, 16, 16), "max_new_tokens": 5}
    for call in (lade.generate, lade.stream):
        with pytest.raises(lade.UnsupportedModelError, match=reason):
            call(model, lookahead=PAPER, **arguments)
    assert not passes


@pytest.mark.slow
@pytest.mark.parametrize("case", [GEMMA3, QWEN2_5_VL], ids=str)
def test_what_a_model_feeds_beside_the_text_after_its_images_is_refused_by_name(case, monkeypatch):
    model, arguments, expected = _given_an_image(case)
    prepare = model.prepare_inputs_for_generation

    def with_more(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**prepare(*args, **kwargs), "image_hidden": torch.ones(1)}

    def without_positions(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**prepare(*args, **kwargs), "position_ids": None}

    with monkeypatch.context() as patch:
        patch.setattr(model, "prepare_inputs_for_generation", with_more)
        with pytest.raises(lade.UnsupportedArgumentError, match="image_hidden cannot be used"):
            lade.generate(model, lookahead=PAPER, **arguments)
        patch.setattr(model, "prepare_inputs_for_generation", without_positions)
        with pytest.raises(lade.UnsupportedArgumentError, match="does not take the positions after it"):
            lade.generate(model, lookahead=PAPER, **arguments)
    assert torch.equal(lade.generate(model, lookahead=PAPER, **arguments), expected)


@pytest.mark.slow
@pytest.mark.parametrize("case", [GEMMA3, QWEN2_5_VL], ids=str)
def test_a_text_after_one_with_an_image(case):
    model, _, _ = _given_an_image(case)  # Qwen keeps the offset of its positions
    assert_same(model, text(20), [PAPER])
    rows = padded()
    assert torch.equal(lookahead(model, **rows, max_new_tokens=25), plain(model, **rows, max_new_tokens=25))
