"""Prompts with images: what comes after them is decoded with trees, and is what `model.generate` writes."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from comparing import ADAPTIVE, CONFIGS, DOORS, PAPER, assert_requests, assert_same
from families import SWITCH, longrope
from graphed import Graphs, shapes_of
from images import OF_SEVERAL_SIZES, SQUARE, Size, batch, prompt, without_image
from multimodal import END, GEMMA3, IMAGE, OTHERS, QWEN2_5_VL, REFUSED, START, USUAL, VIDEO, Multimodal, text
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation import utils

import lade
from lade.model.facts import ModelFacts
from lade.serving import prefix_cache

LONG = {"max_new_tokens": 50, "do_sample": False}
SHORT = {"max_new_tokens": 25, "do_sample": False}
WITH_IMAGES = [case for case in USUAL + OTHERS if case.kind != "Qwen2Audio"]
ALL = [*USUAL, *OTHERS, *(case for case, _ in REFUSED)]
NAMED = ("Qwen2_5_VL", "Gemma3", "Qwen3VL", "SmolVLM", "Gemma4", "Mistral3", "Llava", "InternVL", "Llama4", "Qwen3_5")
BY_NAME = {case.kind: case for case in WITH_IMAGES}
CHOSEN = pytest.mark.parametrize("case", [BY_NAME[name] for name in NAMED], ids=str)
FOUR = pytest.mark.parametrize("case", [BY_NAME[name] for name in NAMED[:4]], ids=str)
TWO = pytest.mark.parametrize("case", [GEMMA3, QWEN2_5_VL], ids=str)
WIDE: Size = (4, 8)
LOW: Size = (2, 4)


@functools.cache
def _built(kind: str) -> Any:
    return next(case for case in ALL if case.kind == kind).build()


def built(case: Multimodal) -> Any:
    """Its model; of those of this file each is built, and checked by `supports`, once."""
    return _built(case.kind)


def images_of(case: Multimodal) -> Sequence[Size]:
    """One or two images, of different sizes where the class takes any."""
    if case.kind in ("Gemma4", "Mistral3"):
        return (SQUARE, LOW)
    return (WIDE, LOW) if case.kind in OF_SEVERAL_SIZES else (SQUARE,)


def rows_of(case: Multimodal) -> Sequence[Sequence[Size]]:
    """The images of three prompts that differ in length."""
    first, *more = images_of(case)
    if case.kind in ("SmolVLM", "Idefics3"):
        return [[first, first]] * 2
    return [[first, *more, first], more or [first], [first]]


def assert_plains(model: Any, arguments: dict[str, Any], configs: Sequence[Any] = (PAPER,), **more: Any) -> lade.Stats:
    """Assert that every config writes what plain decoding writes with these arguments."""
    given = {**arguments, **more}
    return assert_same(model, given.pop("input_ids"), configs, **given)


def written(model: Any, arguments: dict[str, Any]) -> torch.Tensor:
    """What plain decoding writes, which is another text without the images."""
    expected: torch.Tensor = model.generate(**arguments)
    length = arguments["input_ids"].shape[1]
    options = {name: arguments[name] for name in arguments if name not in ("input_ids", "attention_mask")}
    options = {name: value for name, value in options.items() if not isinstance(value, torch.Tensor)}
    torch.manual_seed(1234)
    assert not torch.equal(expected, model.generate(**without_image(arguments), **options)), "the image does nothing"
    assert len(set(expected[:, length:].flatten().tolist())) > 3, "the text puts nothing to the test"
    return expected


@pytest.mark.one_in(14)
@pytest.mark.parametrize("case", WITH_IMAGES, ids=str)
def test_a_prompt_with_images_is_served(case, watch):
    model, arguments = built(case), {**prompt(case, images_of(case)), **LONG}
    written(model, arguments)
    stats = assert_plains(model, arguments, (PAPER, ADAPTIVE[0]) if case.kind in NAMED else (PAPER,))
    assert stats.tokens_per_step > 1 and stats.fallback is None and watch.branched and watch.moved


@pytest.mark.slow
@TWO
def test_all_configs_and_prompts_in_chunks(case):
    model = built(case)
    for seed, images in ((1, [SQUARE]), (2, [SQUARE] * 3)):
        arguments = {**prompt(case, images, seed=seed), **SHORT}
        assert_plains(model, arguments, CONFIGS)
        if hasattr(utils, "_slice_mm_encoder_output"):  # older ones cannot feed images in chunks
            assert_plains(model, arguments, prefill_chunk_size=7)


class Shift(LogitsProcessor):
    """A user's own processor: it reads the text so far, image placeholders included."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        bias = torch.zeros_like(scores)
        bias[:, int(input_ids.sum()) % 50] = 3.0
        return scores + bias  # type: ignore[return-value]


@pytest.mark.one_in(18)
@CHOSEN
def test_samples_and_processors_are_plains(case):
    model, inputs = built(case), prompt(case, images_of(case))
    for options in (
        {"do_sample": True, "temperature": 0.8, "top_k": 20},
        {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"do_sample": False, "logits_processor": LogitsProcessorList([Shift()])},
    ):
        assert_plains(model, inputs, max_new_tokens=25, **options)


@pytest.mark.one_in(18)
@CHOSEN
def test_a_second_turn_goes_on_from_a_cache_with_an_image_in_it(case):
    model, first = built(case), {**prompt(case, images_of(case)), **SHORT}
    more: dict[str, Any] = {**SHORT, "return_dict_in_generate": True, "output_logits": True}
    recurrent = case.kind == "Qwen3_5"  # whose states only transformers' own layers keep, or ours
    borrowed = [] if recurrent else [(PAPER, DynamicCache())]
    plains = None, DynamicCache(config=model.config if recurrent else None)
    turns: list[Any] = []
    for config, cache in (plains, *borrowed, (PAPER, lade.TreeCache())):
        ids = lade.generate(model, lookahead=config, past_key_values=cache, **first)
        ids = torch.cat([ids, text(4)], dim=1)
        second = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}
        turns.append(lade.generate(model, lookahead=config, past_key_values=cache, **second))
    plain, *ours = turns
    assert all(torch.equal(turn.sequences, plain.sequences) for turn in ours)
    assert all(torch.allclose(turn.logits[0], plain.logits[0], atol=1e-4) for turn in ours)
    assert not torch.allclose(model.generate(**second).logits[0], plain.logits[0], atol=1e-2), "the image does nothing"


@pytest.mark.one_in(18)
@CHOSEN
def test_batches_with_images_of_several_sizes_are_plains(case):
    model, arguments = built(case), {**batch(case, rows_of(case)), **SHORT}
    expected = written(model, arguments)
    assert_plains(model, arguments, (PAPER, ADAPTIVE[0]))
    assert_plains(model, arguments, eos_token_id=int(expected[0, -20]))  # rows leave at different times
    assert_plains(model, arguments, max_new_tokens=12, do_sample=True, num_return_sequences=2)


@pytest.mark.one_in(4)
@TWO
def test_batches_whose_rows_are_shown_together(case):
    """As a user's own processor asks for."""
    model, arguments = built(case), {**batch(case, rows_of(case)), **SHORT}
    shown = {"logits_processor": LogitsProcessorList([Shift()])}
    other = model.generate(**arguments, **shown)
    assert not torch.equal(other, model.generate(**arguments)), "the processor does nothing"
    stats = assert_plains(model, arguments, **shown)
    assert stats.fallback is None and stats.generations == len(other)


@pytest.mark.one_in(18)
@FOUR
def test_beams_are_plains(case):
    model = built(case)
    for inputs in (prompt(case, images_of(case)), batch(case, rows_of(case))):
        assert_plains(model, inputs, **SHORT, num_beams=3)


@pytest.mark.one_in(18)
@CHOSEN
def test_requests_of_an_engine_come_and_go(case):
    _compare_requests(built(case), case)


def _compare_requests(model: Any, case: Multimodal) -> None:
    images = images_of(case)
    given = [
        prompt(case, images),
        {"input_ids": text(9)},
        prompt(case, images[:1], seed=4),
        prompt(case, images, seed=7),
        {**prompt(case, images, seed=4), "input_ids": prompt(case, images)["input_ids"]},  # looks like the first one
    ]
    asked = [{**each, "max_new_tokens": new} for each, new in zip(given, (25, 40, 12, 30, 25), strict=True)]
    kept = 0 if ModelFacts.of(model).recurrent else 2**20
    with patch.object(prefix_cache, "MIN_PREFIX", 3):
        handles = assert_requests(model, asked, max_rows=3, prefill_tokens=5, prefix_cache=kept)
    assert not any(handle.cached_tokens for handle in handles)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("case", ALL, ids=str)
def test_what_is_supported_is_served_and_what_is_not_is_refused(case):
    """Prompts of text and with images, on every way in: either none falls back or raises, or all do."""
    model = built(case)
    support = lade.supports(model)
    prompts: list[dict[str, Any]] = [{"input_ids": text(20)}]
    if support and case in WITH_IMAGES:
        prompts += [prompt(case, images_of(case))]
    for arguments in ({**it, "max_new_tokens": 8, "do_sample": False} for it in prompts):
        expected = model.generate(**arguments)
        for name, door in DOORS.items():
            if support:
                assert torch.equal(door(model, lookahead=PAPER, **arguments), expected), name
            else:
                with pytest.raises(lade.UnsupportedModelError):
                    door(model, lookahead=PAPER, **arguments)
        stats = lade.Stats()
        with warnings.catch_warnings():
            warnings.simplefilter("error" if support else "ignore", lade.FallbackWarning)
            assert torch.equal(lade.generate(model, stats=stats, **arguments), expected)
        assert (stats.fallback is None) == bool(support)


@pytest.mark.slow
@FOUR
def test_captured_passes_are_plains(case, monkeypatch):
    model, graphs = built(case), Graphs(torch.device("cpu")).serve(monkeypatch)
    for inputs in (prompt(case, images_of(case)), batch(case, rows_of(case))):
        assert_plains(model, inputs, **SHORT)
    _compare_requests(model, case)
    assert graphs.counted.replayed > 10 and shapes_of(graphs.pool(model))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Qwen2_5_VL", "Qwen3VL"])
def test_a_film_is_served_as_well(kind):
    model = _built(kind)
    ids = torch.cat([text(6), torch.tensor([[START, *[VIDEO] * 4, END]]), text(5, seed=1)], dim=1)
    film = torch.randn(16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    arguments = {
        "input_ids": ids,
        "mm_token_type_ids": 2 * (ids == VIDEO).long(),
        "pixel_values_videos": film,
        "video_grid_thw": torch.tensor([[1, 4, 4]]),
        **LONG,
    }
    written(model, arguments)
    assert_plains(model, arguments)


@pytest.mark.slow
def test_a_length_at_which_the_text_is_computed_again_is_not_crossed():
    case = next(case for case in USUAL if case.kind == "Llava")
    model = dataclasses.replace(case, text={"model_type": "phi3", **longrope()}, without=("head_dim",)).build()
    arguments = {**prompt(case), "do_sample": False}
    for length in (arguments["input_ids"].shape[1] + 5, SWITCH):
        assert_plains(model, arguments, max_length=length)
    with pytest.raises(lade.UnsupportedArgumentError, match=f"beyond {SWITCH} tokens this model recomputes"):
        lade.generate(model, lookahead=PAPER, **arguments, max_length=SWITCH + 1)


class First(LogitsProcessor):
    """Has a text begin with what stands in front of images."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] == self.length:
            scores[:, START] = scores.max() + 1.0
        return scores


@pytest.mark.parametrize("config", [lade.LookaheadConfig(0, 4, 5), lade.LookaheadConfig(budget=8)])
def test_placeholders_are_no_guesses(config, watch):
    model, arguments = built(GEMMA3), {**prompt(GEMMA3, [SQUARE] * 3), **SHORT}
    arguments["logits_processor"] = LogitsProcessorList([First(arguments["input_ids"].shape[1])])
    expected = model.generate(**arguments)
    assert lade.supports(model)
    watch.trees.clear()  # those of the check
    assert torch.equal(lade.generate(model, lookahead=config, **arguments), expected)
    assert watch.trees[0].ids[0] == START
    guessed = [
        (token, source)
        for tree in watch.trees
        for token, source in zip(tree.ids[1:], tree.sources[1:], strict=True)
        if source != "window"  # whose cells are what the model chose
    ]
    assert guessed and not any(token == IMAGE for token, _ in guessed)
