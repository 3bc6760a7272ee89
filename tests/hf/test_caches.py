"""A conversation's cache: handed in, used, handed back; ours to plain decoding and the other way round."""

import copy
import functools
import pickle

import pytest
import torch
from same_as_plain import assert_same_cache, windowed
from spies import failing, watched
from transformers import DynamicCache, StaticCache

import lade
from lade import LookaheadConfig
from lade.model.facts import CACHE, as_cache
from lade.testing import toy_model

IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])


def ours(model, ids, new, lookahead=LookaheadConfig(4, 3, 4), **more):  # noqa: B008 - it is never changed
    return lade.generate(model, input_ids=ids, max_new_tokens=new, lookahead=lookahead, **more)


adaptive = functools.partial(ours, lookahead=LookaheadConfig(budget=12))


def plain(model, ids, new, **more):
    return model.generate(ids, max_new_tokens=new, **more)


@pytest.mark.one_in(22)
@pytest.mark.parametrize("make", [toy_model, windowed], ids=["full", "sliding window"])
@pytest.mark.parametrize("kind", ["plain", "with config", "ours", "static"])
@pytest.mark.parametrize(
    "turns", [(plain, ours), (ours, plain), (ours, ours), (plain, ours, plain, ours), (adaptive, plain, adaptive)]
)
def test_turns_may_be_decoded_by_either(make, kind, turns):
    model = make()
    cache = {
        "plain": DynamicCache,
        "with config": lambda: DynamicCache(config=model.config),
        "ours": lade.TreeCache,
        "static": lambda: StaticCache(config=model.config, max_cache_len=128),
    }[kind]()
    text = IDS
    for turn, generate in enumerate(turns):
        text = torch.cat([text, torch.tensor([[7 + turn, 9]])], dim=1)
        expected = model.generate(text, max_new_tokens=14)
        output = generate(model, text, 14, past_key_values=cache)
        assert torch.equal(output, expected)
        assert cache.get_seq_length() == output.shape[1] - 1
        text = output


def test_the_output_carries_the_users_own_cache_and_what_is_in_it_is_not_fed_again():
    model, cache = toy_model(), DynamicCache()
    output = ours(model, IDS, 5, past_key_values=cache, return_dict_in_generate=True)
    assert output.past_key_values is cache and cache.get_seq_length() == 12
    text = torch.cat([output.sequences, torch.tensor([[6, 6, 6]])], dim=1)
    assert next(lade.stream(model, input_ids=text, max_new_tokens=9, past_key_values=cache)).fed == 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda config: StaticCache(config=config, max_cache_len=11), "slots for 11 tokens, and the text may need 12"),
        (lambda config: DynamicCache(offloading=True), "type DynamicCache cannot be used .* it cannot be copied from"),
        (lambda config: StaticCache(config=config, max_cache_len=64, offloading=True), "type StaticCache cannot be"),
    ],
)
def test_caches_that_cannot_be_filled_are_refused(make, said, monkeypatch):
    monkeypatch.setattr(torch, "Stream", lambda: None, raising=False)  # offloading needs a GPU
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    model = toy_model()
    with pytest.raises(lade.UnsupportedArgumentError, match=said):
        ours(model, IDS, 5, past_key_values=make(model.config))


@pytest.mark.parametrize("make", [toy_model, windowed], ids=["full", "sliding window"])
def test_a_static_cache_that_is_filled_half_is_as_before(make, monkeypatch):
    """Its layers are written to, one after the other."""
    model = make()
    cache = StaticCache(config=model.config, max_cache_len=64)
    text = ours(model, IDS, 14, past_key_values=cache)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        failing(patch, cache.layers[-1], "update", KeyboardInterrupt)
        ours(model, text, 9, past_key_values=cache)
    assert len(cache.layers) > 1 and {int(layer.get_seq_length()) for layer in cache.layers} == {text.shape[1] - 1}
    assert torch.equal(plain(model, text, 9, past_key_values=cache), plain(model, text, 9))


def filled(model, tokens, kind=DynamicCache):
    """A cache of a user's own that holds these tokens, and the text that they begin."""
    text, cache = plain(model, IDS, 20), kind()
    with torch.no_grad():
        model(text[:, :tokens], past_key_values=cache)
    return cache


@pytest.mark.one_in(16)
@pytest.mark.parametrize("make", [toy_model, windowed], ids=["full", "sliding window"])
@pytest.mark.parametrize("kind", [DynamicCache, lade.TreeCache])
@pytest.mark.parametrize("tokens", [6, 7, 8, 9, 15])
def test_a_cache_that_leaves_nothing_of_the_prompt_to_feed_is_left_to_plain_decoding(make, kind, tokens):
    model = make()
    expected = plain(model, IDS, 10, past_key_values=filled(model, tokens))
    if tokens < IDS.shape[1]:
        assert torch.equal(ours(model, IDS, 10, past_key_values=filled(model, tokens, kind)), expected)
        return
    with pytest.raises(lade.UnsupportedArgumentError, match=f"holds {tokens} tokens and the prompt has 8.* crop it"):
        ours(model, IDS, 10, past_key_values=filled(model, tokens, kind))
    with pytest.raises(lade.UnsupportedArgumentError, match=f"holds {tokens} tokens"):
        given = {"max_new_tokens": 10, "past_key_values": filled(model, tokens, kind)}
        lade.stream(model, IDS, lookahead=LookaheadConfig(4, 3, 4), **given)
    with pytest.warns(lade.FallbackWarning, match=f"holds {tokens} tokens"):
        fallen = lade.generate(model, IDS, max_new_tokens=10, past_key_values=filled(model, tokens, kind))
    assert torch.equal(fallen, expected)


@pytest.mark.parametrize("kind", [DynamicCache, lade.TreeCache])
def test_caches_of_several_rows_or_of_an_interrupted_pass_are_refused(kind):
    model, several, torn = toy_model(), kind(), kind()

    def interrupt(*_):
        raise KeyboardInterrupt

    with torch.no_grad():
        model(IDS[:, :3].repeat(2, 1), past_key_values=several)
        model(IDS[:, :3], past_key_values=torn)
        model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(IDS[:, 3:5], past_key_values=torn)
    with pytest.raises(lade.UnsupportedArgumentError, match="it holds 2 rows, and there is one prompt"):
        ours(toy_model(), IDS, 5, past_key_values=several)
    with pytest.raises(lade.UnsupportedArgumentError, match="its layers hold from 3 to 5 tokens"):
        ours(toy_model(), IDS, 5, past_key_values=torn)


def test_a_padded_prompt_gets_plains_cache_and_continues_none():
    model = toy_model()
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), IDS], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 8])
    output = ours(model, padded, 5, attention_mask=mask, return_dict_in_generate=True)
    asked = {"attention_mask": mask, "return_dict_in_generate": True}
    assert_same_cache(output.past_key_values, plain(model, padded, 5, **asked).past_key_values, mask)
    with pytest.raises(lade.UnsupportedArgumentError, match=f"padding with {CACHE}"):
        ours(model, padded, 5, attention_mask=mask, past_key_values=DynamicCache())


USES = {
    "a forward with gradients": lambda model, cache: model(IDS[:, :3], **as_cache(cache)).logits,
    "iteration": lambda model, cache: [tuple(item[0].shape) for item in cache],
    "rows repeated": lambda model, cache: (cache.batch_repeat_interleave(2), cache.layers[0].keys)[1],
    "a copy": lambda model, cache: copy.deepcopy(cache).layers[-1].values,
    "pickled": lambda model, cache: pickle.loads(pickle.dumps(cache)).layers[-1].values,
    "cropped": lambda model, cache: (cache.crop(-4), cache.layers[0].keys)[1],
    "truth": lambda model, cache: bool(cache),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("make", [toy_model, windowed], ids=["full", "sliding window"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_cache_of_an_output_is_used_as_plains_is(make, use, rows):
    if use == "cropped" and make is windowed:
        pytest.skip("transformers crops no windows that are full")
    model, ids = make(), torch.cat([IDS + row for row in range(rows)])
    end = int(plain(model, ids, 9)[-1, -1])
    asked = {"return_dict_in_generate": True, "eos_token_id": end, "pad_token_id": 0}  # the last row ends early
    expected = plain(model, ids, 16, **asked)
    lade.enable(model)
    found = plain(model, ids, 16, **asked)
    lade.disable(model)
    assert torch.equal(found.sequences, expected.sequences)
    results = []
    for output in (found, expected):
        cache = output.past_key_values
        if use == "a forward with gradients" and rows > 1:
            cache.batch_select_indices(torch.tensor([0]))
        results.append(USES[use](model, cache))
    if isinstance(results[0], torch.Tensor):
        torch.testing.assert_close(*results)
    else:
        assert results[0] == results[1]
    fresh = ours(model, ids, 16, **asked)
    assert_same_cache(fresh.past_key_values, plain(model, ids, 16, **asked).past_key_values)


def test_the_cache_of_a_batch_is_not_computed_before_it_is_read(monkeypatch):
    model = toy_model()
    calls = watched(monkeypatch, model, "forward", lambda *given, **named: None)
    output = ours(model, IDS.repeat(2, 1), 9, return_dict_in_generate=True)
    before = len(calls)
    assert isinstance(output.past_key_values, DynamicCache) and len(calls) == before
    assert output.past_key_values.get_seq_length() == output.sequences.shape[1] - 1 and len(calls) == before + 1


def test_the_cache_of_a_batch_goes_by_no_setting_of_the_checkpoint():
    model, ids = toy_model(), torch.cat([IDS, IDS + 1])
    asked = {"return_dict_in_generate": True, "num_beams": 1, "stop_strings": None, "num_return_sequences": 1}
    expected = plain(model, ids, 9, **asked).past_key_values
    model.generation_config.num_beams = model.generation_config.num_return_sequences = 2
    found = ours(model, ids, 9, **asked).past_key_values
    assert_same_cache(found, expected)
