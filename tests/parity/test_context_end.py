"""Near the context's end, beyond it, and across the lengths at which rotary scalings change."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from comparing import CONFIGS, assert_refused, assert_same, lookahead, plain, prompt
from families import DYNAMIC, SWITCH, family, longrope
from packaging.version import Version
from transformers import DynamicCache, Phi3ForCausalLM
from transformers.testing_utils import CaptureLogger
from transformers.utils.logging import warning_once

import lade
from lade.model.config import Positions

CONTEXT = 64
LEARNED = ["gpt2", "opt", "gpt_bigcode"]


@pytest.mark.one_in(24)
@pytest.mark.parametrize("length", [5, 40, 58, 62, 63])
@pytest.mark.parametrize("name", [*LEARNED, "llama", "gpt_neox"])
def test_up_to_the_very_last_position(name, length, watch):
    model = family(name).build(max_position_embeddings=CONTEXT)
    # The last token needs no position of its own: a context of 64 takes 65 tokens.
    stats = assert_same(model, prompt(length), CONFIGS, max_new_tokens=CONTEXT + 1 - length)
    assert watch.furthest < CONTEXT
    assert length > 5 or stats.tokens_per_step > 1, "no guess was ever taken"


@pytest.mark.parametrize("name", LEARNED)
def test_beyond_a_table_of_positions_plain_decoding_fails_and_so_do_we(name):
    model = family(name).build(max_position_embeddings=CONTEXT)
    for decode in (plain, lookahead):
        with pytest.raises(IndexError, match="index out of range"):
            decode(model, prompt(40), max_new_tokens=CONTEXT)


@pytest.mark.parametrize("name", LEARNED)
def test_a_prompt_longer_than_a_table_of_positions(name):
    model = family(name).build(max_position_embeddings=CONTEXT)
    with pytest.raises(lade.InputError, match=r"input_ids has 65 tokens, but .* has positions for 64: shorten"):
        lookahead(model, prompt(65))


@pytest.mark.one_in(32)
@pytest.mark.parametrize("length", [30, 60, 64, 70])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "falcon", "bloom"])
def test_rotary_models_run_on_beyond_their_context(name, length):
    model = family(name).build(max_position_embeddings=CONTEXT)
    assert_same(model, prompt(length), CONFIGS[:3], max_new_tokens=50)


def test_the_warning_of_transformers_comes_as_often_as_in_plain_decoding():
    model = family("llama").build(max_position_embeddings=CONTEXT)
    said = []
    for decode in (plain, lookahead):
        with CaptureLogger(logging.getLogger("transformers")) as caught:
            warning_once.cache_clear()
            decode(model, prompt(60), max_new_tokens=10)
        said.append(caught.out)
    assert said[0] == said[1] and "maximum length (64)" in said[0]


# --- rotary scalings that look at the longest position ---------------------------------------------------------------

SCALED = [
    pytest.param("llama", DYNAMIC, id="llama-dynamic"),
    pytest.param("mistral-window", DYNAMIC, id="mistral-window-dynamic"),
    pytest.param("llama", longrope(), id="llama-longrope"),
    pytest.param("llama", longrope(48), id="llama-longrope-and-context-end"),
    pytest.param("phi3", longrope(), id="phi3-longrope"),
    pytest.param("phi3-window", longrope(), id="phi3-window-longrope"),
    pytest.param("phi3", longrope(48), id="phi3-longrope-and-context-end"),
]
LOSES_TEXT = Version(transformers.__version__) < Version("5.20")
CHANGING = [SCALED[0], SCALED[2], SCALED[4]]
LENGTHS = [5, SWITCH - 8, SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 9]


@pytest.mark.one_in(68)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("name", "fields"), SCALED)
def test_crossing_the_length_at_which_frequencies_change(name, fields, length):
    _assert_same_afresh(name, fields, [length], max_new_tokens=40)


@pytest.mark.one_in(10)
@pytest.mark.parametrize(("name", "fields"), SCALED)
def test_the_frequencies_do_change(name, fields):
    """Otherwise the test above would pass by itself."""
    model = family(name).build(**fields)
    unscaled = family(name).build(max_position_embeddings=512)
    assert not torch.equal(plain(model, prompt(30)), plain(unscaled, prompt(30)))
    assert Positions.of(model.config).room(SWITCH - 3) == 2 and Positions.of(unscaled.config).room(SWITCH - 3) > 400


@pytest.mark.one_in(14)
@pytest.mark.parametrize(("name", "fields"), SCALED)
def test_a_short_text_after_a_long_one(name, fields):
    """Dynamic frequencies are state of the model: what one text leaves behind is what plain decoding leaves behind."""
    _assert_same_afresh(name, fields, [20, SWITCH + 9, SWITCH, 5], max_new_tokens=30)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("chunk", [5, SWITCH])
@pytest.mark.parametrize(("name", "fields"), CHANGING)
def test_prefill_in_chunks_across_the_switch(name, fields, chunk):
    _assert_same_afresh(name, fields, [SWITCH + 9], prefill_chunk_size=chunk, max_new_tokens=20)


def test_a_text_that_plain_decoding_would_lose_at_the_switch_is_refused(monkeypatch):
    """As in transformers up to 5.19: the cache is dropped, and only the last token is fed."""
    prepare = Phi3ForCausalLM.prepare_inputs_for_generation

    def losing(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = prepare(self, *args, **kwargs)
        if kwargs.get("next_sequence_length") == 1:
            prepared["input_ids"] = prepared["input_ids"][:, -1:]
            prepared["position_ids"] = prepared["position_ids"][:, -1:]
            prepared["attention_mask"] = None
        return prepared

    monkeypatch.setattr(Phi3ForCausalLM, "prepare_inputs_for_generation", losing)
    model = family("phi3").build(**longrope())
    said = "beyond 32 tokens this transformers loses the text"
    assert_refused(model, prompt(10), said, lade.UnsupportedArgumentError, max_new_tokens=30)
    assert_same(model, prompt(10), max_new_tokens=SWITCH - 10)
    assert_same(model, prompt(SWITCH + 3), max_new_tokens=20)


# --- llama4: the attention temperature of layers without rotary embedding -------------------------------------------


@pytest.mark.one_in(12)
@pytest.mark.parametrize("floor", [4, 7, 32])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_crossing_the_steps_of_an_attention_temperature(backend, floor):
    model = family("llama4_text").build(backend, floor_scale=floor, attn_scale=3.0)
    assert_same(model, prompt(20), CONFIGS[:3], max_new_tokens=60)
    assert any(not layer.self_attn.use_rope for layer in model.model.layers)


def _assert_same_afresh(name: str, fields: dict[str, Any], lengths: list[int], **arguments: Any) -> None:
    """Decode one text after the other, plainly and with every config, each time on a model of its own.

    Dynamic frequencies outlive a generation: already two plain ones on one model may differ.
    """
    if name.startswith("phi3") and LOSES_TEXT and min(lengths) <= SWITCH:
        pytest.skip("plain decoding of this transformers loses the text at the switch: it is refused, see below")
    prompts, texts = [prompt(length) for length in lengths], []
    for config in (None, *CONFIGS[:3]):
        model = family(name).build(**fields)
        decode = plain if config is None else partial(lookahead, config=config)
        texts.append([decode(model, ids, **arguments) for ids in prompts])
        assert all(map(torch.equal, texts[-1], texts[0])), config


@pytest.mark.one_in(10)
@pytest.mark.parametrize("kind", [DynamicCache, lade.TreeCache])
@pytest.mark.parametrize(("name", "fields"), CHANGING)
@pytest.mark.parametrize("first", [5, 6, 7, 8, 25])
def test_a_users_cache_goes_on_after_the_switch(name, fields, first, kind):
    """The second turn ends before, at and behind the switch, where some models recompute the text.

    A cache must not hold some of it with the old frequencies then.
    """
    if name == "phi3" and LOSES_TEXT:
        pytest.skip("plain decoding of this transformers loses the text at the switch")
    texts = []
    for decode, cache in ((plain, DynamicCache()), (lookahead, kind())):
        model, text = family(name).build(**fields), prompt(SWITCH - 15)
        for turn, new_tokens in enumerate((5, first, 12)):
            text = decode(model, text, past_key_values=cache, max_new_tokens=new_tokens)
            text = torch.cat([text, prompt(3, seed=turn)], dim=1)
        texts.append(text)
    assert torch.equal(*texts)
