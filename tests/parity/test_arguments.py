"""The arguments of `generate`: padding, caches, processors, criteria, lengths, all as in plain decoding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comparing import CONFIGS, PAPER, assert_refused, assert_same, lookahead, plain, prompt, streamed
from families import VOCABULARY, WINDOW, family, longrope
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from torch.nn.functional import pad
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

import lade

SHAPES = ["llama", "gpt2", "opt", "bloom", "mistral-window", "gemma3_text", "llama4_text"]


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return family(request.param).build()


@pytest.fixture
def llama() -> PreTrainedModel:
    return family("llama").build()


@pytest.mark.one_in(14)
@pytest.mark.parametrize("shape", SHAPES)
def test_left_padding_is_taken_off(shape):
    # bloom in float64 makes NaN of padding by itself; llama4's temperature counts padding in plain decoding
    dtype, fields = torch.float32 if shape == "bloom" else None, {"floor_scale": 8192} if "llama4" in shape else {}
    model = family(shape).build(dtype=dtype, **fields)
    ids = prompt(9)
    padded, mask = pad(ids, (5, 0)), (torch.arange(14) >= 5).long()[None]
    assert_same(model, padded, attention_mask=mask)
    ours = lookahead(model, padded, attention_mask=mask)
    assert torch.equal(ours[:, 5:], plain(model, ids)) and torch.equal(ours[:, :14], padded)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "fields"), [("llama4_text", {}), ("phi3", longrope())])
def test_left_padding_that_plain_decoding_counts_is_refused(shape, fields):
    model = family(shape).build(**fields)
    padded, mask = pad(prompt(9), (5, 0)), (torch.arange(14) >= 5).long()[None]
    assert_refused(model, padded, "this model counts the padding", lade.UnsupportedArgumentError, attention_mask=mask)


@pytest.mark.one_in(8)
def test_a_prompt_of_one_token(model):
    assert_same(model, prompt(1), CONFIGS[:3], max_new_tokens=40)


@pytest.mark.one_in(18)
@pytest.mark.parametrize("chunk", [1, 4, 7, 64])
def test_prefill_in_chunks(model, chunk):
    assert_same(model, prompt(WINDOW + 11), prefill_chunk_size=chunk, max_new_tokens=40)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "limit", [{"max_new_tokens": 1}, {"max_new_tokens": 33}, {"max_length": 30}, {"max_length": 11}]
)
def test_length_limits(llama, limit):
    assert_same(llama, prompt(10), CONFIGS, **limit)


# --- output objects and caches ---------------------------------------------------------------------------------------


@pytest.mark.one_in(6)
def test_an_output_object_and_its_cache_go_on(model):
    ids = prompt(WINDOW + 8)
    expected = plain(model, ids, max_new_tokens=60)
    first = lookahead(model, ids, max_new_tokens=30, return_dict_in_generate=True)
    assert type(first) is type(plain(model, ids, max_new_tokens=2, return_dict_in_generate=True))
    assert torch.equal(first.sequences, expected[:, : ids.shape[1] + 30])
    assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
    for decode in (lookahead, plain):
        cache = copy.deepcopy(first.past_key_values)
        assert torch.equal(decode(model, first.sequences, max_new_tokens=30, past_key_values=cache), expected), decode


@pytest.mark.one_in(8)
def test_a_tree_cache_serves_a_conversation(model):
    cache, ids, fresh = lade.TreeCache(), prompt(10), prompt(10)
    for turn in range(3):
        given = {"past_key_values": cache, "max_new_tokens": 15, "do_sample": False, "lookahead": PAPER}
        steps = list(lade.stream(model, ids, **given))
        assert steps[0].fed == (10 if turn == 0 else 7), "only what is new is fed"
        ids = torch.cat([ids, torch.tensor([[token for step in steps for token in step.tokens]])], dim=1)
        fresh = plain(model, fresh, max_new_tokens=15)
        assert torch.equal(ids, fresh)
        more = prompt(6, seed=turn)
        ids, fresh = torch.cat([ids, more], dim=1), torch.cat([fresh, more], dim=1)


def test_a_cache_filled_by_a_forward_pass(llama):
    ids, cache = prompt(20), lade.TreeCache()
    with torch.no_grad():
        llama(ids[:, :15], past_key_values=cache)
    assert torch.equal(lookahead(llama, ids, past_key_values=cache), plain(llama, ids))


# --- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(14)
def test_every_one_of_several_eos_ids_ends_the_text(model):
    ids = prompt(10)
    text = plain(model, ids)[0, 10:].tolist()
    firsts = sorted({token: i for i, token in reversed(list(enumerate(text)))}.items(), key=lambda item: item[1])
    for token, place in firsts[1:4]:
        never = next(id for id in range(1, VOCABULARY) if id not in text)
        stats = assert_same(model, ids, CONFIGS, eos_token_id=[never, token])
        assert stats.new_tokens == len(CONFIGS) * (place + 1)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Every id is written as two letters."""
    letters = {chr(97 + i // 26) + chr(97 + i % 26): i for i in range(VOCABULARY)} | {"abcdef": VOCABULARY}
    backend = Tokenizer(WordLevel(letters, unk_token="aa"))
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_stop_strings(llama, tokenizer):
    text = plain(llama, prompt(10))[0, 10:].tolist()
    stop = tokenizer.decode(text[15:17])
    arguments: dict[str, Any] = {"stop_strings": [stop, "zz"], "tokenizer": tokenizer}
    assert_same(llama, prompt(10), CONFIGS, **arguments)
    assert lookahead(llama, prompt(10), **arguments).shape[1] <= 27
    ours = streamed(llama, prompt(10), max_new_tokens=40, do_sample=False, lookahead=PAPER, **arguments)
    assert torch.equal(ours, plain(llama, prompt(10), **arguments))


@pytest.mark.slow
def test_stop_strings_end_rows_of_a_batch_where_they_come(llama, tokenizer):
    ids = torch.cat([prompt(10, seed=seed) for seed in range(4)])
    texts = plain(llama, ids)[:, 10:]
    stops = [tokenizer.decode(texts[row, place : place + 2]) for row, place in ((1, 6), (2, 30))]
    arguments: dict[str, Any] = {"stop_strings": stops, "tokenizer": tokenizer, "pad_token_id": 0}
    assert_same(llama, ids, CONFIGS, eos_token_id=int(texts[3, 35]), **arguments)
    ours = lookahead(llama, ids, eos_token_id=int(texts[3, 35]), **arguments)
    assert ours.shape[1] > 18 and not ours[1, 18:].any(), "row 1 has ended, and others go on"
    assert_same(llama, ids, CONFIGS[:2], **arguments)  # without an end of sequence rows write on


def test_token_healing_of_a_generation_config_is_refused(llama, tokenizer):
    config = GenerationConfig(max_new_tokens=5, do_sample=False, token_healing=True)
    with pytest.raises(lade.UnsupportedArgumentError, match="token_healing=True"):
        lade.generate(llama, prompt(10), lookahead=PAPER, generation_config=config, tokenizer=tokenizer)
