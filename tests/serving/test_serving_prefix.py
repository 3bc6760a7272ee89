"""Texts that are kept for prompts that begin like them: the same tokens, fewer of them fed, no draft lost."""

import random
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from effort import examples
from families import RECURRENT_FAMILIES
from graphed import Graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from inside import batch_of, prefix_cache_of, texts_of
from peft import LoraConfig, get_peft_model
from serving_toys import LLAMA, PAD, SOON, VOCABULARY, Driven, alone, at_rest, finished, random_ids
from spies import failing, watched

from lade import ConfigError, Engine, LookaheadConfig, UnsupportedArgumentError
from lade.decoding.drafting.adaptive import AdaptiveDrafter
from lade.decoding.kernels.layout import WIDTH
from lade.decoding.readout import Readout
from lade.decoding.verify import Verdict
from lade.errors import CaptureWarning
from lade.hf import job
from lade.model.kv_cache import TreeCache
from lade.serving.prefix_cache import MIN_PREFIX, CachedLogits, CachedText, PrefixCache, RecordingDrafter
from lade.testing import toy_model

METHODS = (None, LookaheadConfig(0, 3, 4), LookaheadConfig(4, 2, 0), LookaheadConfig(budget=8))
MEGABYTE = 2**20


def whole(ids):
    """All of a prompt is text, also where an answer has the id of padding in it."""
    return {"attention_mask": torch.ones_like(ids)}


def turns(engine, number=5, scope=None, method=METHODS[3], **arguments):
    """A conversation: each prompt has all that was said before. Its handles, each with its prompt."""
    arguments = {"max_new_tokens": 24, "pad_token_id": PAD, **arguments}
    ids, handles = random_ids(40, 7), []
    for turn in range(number):
        handle = engine.add(ids, lookahead=method, scope=scope, **whole(ids), **arguments)
        handles.append((handle, ids))
        ids = torch.cat([handle.result(SOON), random_ids(3, turn)], dim=1)
    return handles


# --- conversations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (METHODS[1], {}),
        (METHODS[3], {"do_sample": True, "seed": 3, "repetition_penalty": 1.2}),
        *(pytest.param(method, {}, marks=pytest.mark.slow) for method in (METHODS[0], *METHODS[2:])),
    ],
)
def test_a_conversation_is_fed_once(method, arguments):
    with Engine(LLAMA, prefix_cache=MEGABYTE, prefill_tokens=16) as engine:
        handles = turns(engine, method=method, **arguments)
        told = at_rest(engine)
    seed = arguments.pop("seed", 0)
    for handle, ids in handles:
        assert handle.tokens == alone(LLAMA, ids, seed, max_new_tokens=24, **whole(ids), **arguments)
    for (before, ids), (handle, _) in pairwise(handles):
        assert handle.cached_tokens == ids.shape[1] + len(before.tokens) - 1, "all but the last one, which was not fed"
    assert [next(iter(handle)).fed for handle, _ in handles] == [40, 4, 4, 4, 4]
    assert handles[0][0].cached_tokens == 0
    assert told.cached_tokens == sum(handle.cached_tokens for handle, _ in handles)
    assert told.prompt_tokens == sum(ids.shape[1] for _, ids in handles)
    assert told.prefix_texts == 1 and 0 < told.prefix_bytes <= told.max_prefix_bytes == MEGABYTE


@pytest.mark.parametrize("seed", range(2))
def test_drafting_loses_nothing(seed):
    """Steps are those of a conversation whose prompts are fed whole, fed and accepted alike."""
    arguments = {"do_sample": True, "temperature": 0.6, "seed": seed}
    figures = []
    for kept in (MEGABYTE, 0):
        with Engine(LLAMA, prefix_cache=kept) as engine:
            handles = turns(engine, 3, **arguments)
            figures.append([(handle.stats.step_tokens, handle.stats.accepted) for handle, _ in handles])
            assert (handles[2][0].cached_tokens > 0) == bool(kept)
    assert figures[0] == figures[1]


def test_a_prompt_is_kept_as_soon_as_it_is_fed():
    ids = random_ids(90)
    with Engine(LLAMA, prefix_cache=MEGABYTE) as engine:
        handles = [engine.add(ids, seed=seed, do_sample=True, max_new_tokens=20, pad_token_id=PAD) for seed in range(3)]
        for seed, handle in enumerate(handles):
            handle.result(SOON)
            assert handle.tokens == alone(LLAMA, ids, seed, do_sample=True, max_new_tokens=20)
        assert [handle.cached_tokens for handle in handles] == [0, 89, 89]


# --- scopes and limits -----------------------------------------------------------------------------------------------


def test_no_more_is_kept_than_there_may_be():
    most = 100_000
    with Engine(LLAMA, prefix_cache=most) as engine:
        for number in range(12):
            ids = random_ids(40 + number, number)
            handle = finished(engine.add(ids, max_new_tokens=10, scope=str(number % 2)))
            assert handle.tokens == alone(LLAMA, ids, max_new_tokens=10)
        told = at_rest(engine)
        engine.add(random_ids(400), max_new_tokens=1).result(SOON)  # is too large itself
        assert 0 < told.prefix_bytes <= most and 2 <= told.prefix_texts < 12
        assert at_rest(engine).prefix_texts <= told.prefix_texts
    assert engine.snapshot().prefix_bytes == 0, "closing frees all"


def test_no_memory_for_copies_is_no_error(monkeypatch):
    with Engine(LLAMA, prefix_cache=MEGABYTE) as engine:
        turns(engine, 1)
        assert at_rest(engine).prefix_texts == 1
        failing(monkeypatch, TreeCache, "copy_row", torch.OutOfMemoryError("no more"))
        ids = random_ids(50, 3)
        handle = finished(engine.add(ids, max_new_tokens=10))
        assert handle.tokens == alone(LLAMA, ids, max_new_tokens=10) and at_rest(engine).prefix_texts == 0


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1GB"])
def test_a_size_is_a_number_of_bytes(wrong):
    with pytest.raises(ConfigError, match=r"prefix_cache=.* is not valid: give a whole number of bytes >= 0"):
        Engine(LLAMA, prefix_cache=wrong)


def test_states_cannot_be_shared():
    model = next(each for each in RECURRENT_FAMILIES if str(each) == "lfm2").build()
    with pytest.raises(UnsupportedArgumentError, match=r"states of its recurrent layers cannot go back .*give 0"):
        Engine(model, prefix_cache=MEGABYTE)


# --- in batches ------------------------------------------------------------------------------------------------------


def check_arrivals(rng, driven):
    """Prompts that begin like others, of several scopes, at random times, in a cache too small for all."""
    asked, stem = [], random_ids(60, rng.randint(0, 9))
    for _ in range(rng.randint(3, 7)):
        ids, seed = stem[:, : rng.randint(20, 60)], rng.randint(0, 9)
        if asked and rng.random() < 0.5:
            handle, before = rng.choice(asked)
            ids = torch.cat([before, torch.tensor([handle.tokens], dtype=torch.long)], dim=1)[:, :80]
        ids = torch.cat([ids, random_ids(rng.randint(1, 5), rng.randint(0, 99))], dim=1)
        arguments = {"max_new_tokens": rng.randint(1, 24), "do_sample": rng.random() < 0.5}
        scope = rng.choice((None, "a"))
        asked.append((driven.add(ids, rng.choice(METHODS), seed=seed, scope=scope, **whole(ids), **arguments), ids))
        driven.advance(rng.randint(0, 6))
        if rng.random() < 0.1:
            asked.pop()[0].cancel()
    driven.finish()
    cached = prefix_cache_of(driven.batch)
    assert cached.nbytes == sum(text.nbytes for text in texts_of(cached)) <= cached.max_bytes
    return sum(handle.cached_tokens for handle, _ in asked)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(12))
def test_whatever_comes_whenever_gets_its_own_text(seed):
    rng = random.Random(seed)
    limits = rng.choice((5, 64)), rng.randint(1, 4), rng.choice((130, 300)), rng.choice((2, 16))
    prefill, rows, tokens, headroom = limits
    kept = rng.choice((60_000, MEGABYTE))
    check_arrivals(rng, Driven(LLAMA, prefill, rows, tokens, headroom=headroom, prefix_cache=kept))


@pytest.mark.parametrize("seed", [1, 4])
def test_on_captured_passes(monkeypatch, seed):
    Graphs(torch.device("cpu")).serve(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        assert check_arrivals(random.Random(seed), Driven(LLAMA, 64, 3, 1600, headroom=16, prefix_cache=MEGABYTE))


# --- the cached -------------------------------------------------------------------------------------------------------


def text(*tokens, scope=None, client=None):
    """A text of these numbers, each 8 times, that takes 8 bytes a token."""
    return CachedText(scope, np.repeat(np.array(tokens, dtype=np.int64), 8), TreeCache(), CachedLogits(), client)


def ids(*tokens):
    return np.repeat(tokens, 8).tolist()


def test_the_longest_common_beginning_is_found():
    cached = PrefixCache(10**6)
    texts = [text(1, 2, 3, 4, 5), text(1, 2, 3, 4, 9, 9, 9), text(7, 1, 2, 3, 4), text(1, 2, 3, 4, 5, 6, scope="a")]
    for each in texts:
        cached.put(each)
    assert cached.find(None, ids(1, 2, 3, 4, 5, 6)) == (texts[0], 40)
    assert cached.find(None, ids(1, 2, 3, 4, 9)) == (texts[1], 40)
    assert cached.find("a", ids(1, 2, 3, 4, 5, 6, 7)) == (texts[3], 48)
    assert cached.find("b", ids(1, 2, 3, 4, 5)) is None
    assert MIN_PREFIX == 32 and cached.find(None, ids(1, 2, 3, 9)) is None and cached.find(None, []) is None


def test_a_text_replaces_its_own_beginnings():
    cached = PrefixCache(10**6)
    for each in (text(1, 2, 3, 4), text(1, 2, 3, 4, scope="a"), text(1, 2, 3, 4, 5), text(1, 2, 3, 4, 6)):
        cached.put(each)
    assert len(cached) == 3 and cached.nbytes == 8 * (40 + 40 + 32)
    assert not cached.lacks(None, ids(1, 2, 3, 4)) and cached.lacks(None, ids(1, 2, 3, 4, 7))
    assert not cached.lacks(None, ids(9, 9)), "too short to be worth it"


def test_the_text_used_least_lately_goes_first():
    cached = PrefixCache(3 * 8 * 40)
    first, second, third, fourth = (text(n, 2, 3, 4, 5) for n in (10, 20, 30, 40))
    for each in (first, second, third):
        cached.put(each)
    assert cached.find(None, ids(10, 2, 3, 4)) is not None
    cached.put(fourth)
    assert [each.tokens[0] for each in texts_of(cached)] == [30, 10, 40] and cached.nbytes == cached.max_bytes
    cached.put(text(*range(16)))
    assert len(cached) == 3, "too large for all of it"


def test_a_client_with_many_texts_makes_room_by_its_own():
    cached, others = PrefixCache(4 * 8 * 40), text(1, 2, 3, 4, 5, client="one", scope="one")
    cached.put(others)
    for number in range(9):
        cached.put(text(number, 2, 3, 4, 5, client="two", scope=f"two {number}"))
    assert [each.scope for each in texts_of(cached)] == ["one", "two 6", "two 7", "two 8"]
    for number in range(3):
        cached.put(text(number, 3, 3, 4, 5, client="one", scope="one"))
    assert [each.client for each in texts_of(cached)] == ["two", "two", "one", "one"], "each has half"


def test_a_text_is_kept_as_that_of_its_client():
    with Engine(LLAMA, prefix_cache=MEGABYTE) as engine:
        for client, scope in (("a", "a 1"), ("a", "a 2"), (None, "b")):
            ids = random_ids(40, 7)
            engine.add(ids, client=client, scope=scope, max_new_tokens=2, **whole(ids)).result(SOON)
        at_rest(engine)
        kept = texts_of(prefix_cache_of(batch_of(engine)))
        assert [(each.client, each.scope[0]) for each in kept] == [("a", "a 1"), ("a", "a 2"), ("b", "b")]


def test_what_was_said_is_told_in_runs():
    said = CachedLogits()
    said.put(4, np.full((2, 6), 4, np.int32))
    said.put(1, np.full((2, 6), 1, np.int32))
    said.put(6, np.full((9, 6), 6, np.int32))
    assert [(start, len(run), run[0, 0]) for start, run in said.runs(10)] == [(1, 2, 1), (4, 6, 4)]
    copy = said.first(5)
    said.put(0, np.zeros((9, 6), np.int32))
    assert [(start, len(run)) for start, run in copy.runs(99)] == [(1, 2), (4, 1)] and copy.nbytes < said.nbytes


@pytest.mark.parametrize("learns", [True, False])
def test_what_is_known_anyway_is_noted_where_no_logits_of_prompts_are_computed(learns):
    """Of an answer there are logits, whoever may take them from the cached."""
    drafter = AdaptiveDrafter(LookaheadConfig(budget=4, prompt_ngrams=learns), read_logits=False)
    noting, context = RecordingDrafter(drafter), [1, 2, 3]
    assert not noting.wants_prompt_entries and noting.learns_prompts is learns
    noting.begin(context, 2)
    draft = noting.draft(context, None)
    size = len(draft.tree)
    readout = Readout([4] * size, np.full((size, WIDTH), 7, np.int32))
    noting.learn([*context, 4], draft, readout, Verdict([0], [4], ["bonus"]))
    assert [start for start, _ in noting.said.runs(9)] == ([2] if learns else [])


@pytest.mark.parametrize("learns", [True, False])
def test_what_is_known_of_a_text_is_learned_where_it_is_not_computed(learns, monkeypatch):
    ids, driven = random_ids(3 * MIN_PREFIX), Driven(LLAMA, prefix_cache=MEGABYTE)
    driven.add(ids, METHODS[3], max_new_tokens=2)
    driven.finish()
    told = watched(monkeypatch, AdaptiveDrafter, "learn_prompt", lambda drafter, *args: args[1])
    monkeypatch.setattr(job, "reads_logits", lambda *_: False)
    method = LookaheadConfig(budget=8, prompt_ngrams=learns)
    handles = [driven.add(ids, method, max_new_tokens=2) for _ in range(2)]
    driven.finish()
    assert all(handle.cached_tokens for handle in handles)
    assert told == [0, 0] * learns


# --- another state of the model --------------------------------------------------------------------------------------


def with_adapters():
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM", init_lora_weights=False)
    adapted = get_peft_model(toy_model("llama", vocabulary=VOCABULARY, dtype=torch.float32), config, adapter_name="one")
    adapted.add_adapter("two", config)
    draws = torch.Generator().manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora" in name:
            weight.data = torch.randn(weight.shape, generator=draws)
    adapted.set_adapter("one")
    return adapted.eval()


def written_in_place(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)


def written_through_data(model):
    for weight in model.parameters():
        weight.data.mul_(1.5)


def loaded(model):
    model.load_state_dict({name: 1.5 * weight for name, weight in model.state_dict().items()})


def assigned(model):
    for weight in model.parameters():
        weight.data = 1.5 * weight.data


CHANGES = [
    lambda model: model.set_adapter("two"),
    lambda model: model.base_model.disable_adapter_layers(),
    lambda model: model.merge_adapter(),
    lambda model: model.base_model.model.model.layers[0].self_attn.q_proj.set_scale("one", 3.0),
    written_in_place,
    written_through_data,
    loaded,
    assigned,
]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
@pytest.mark.parametrize("change", CHANGES)
def test_a_text_is_found_only_while_the_model_is_as_it_was_when_the_text_was_fed(change):
    model, ids, given = (
        with_adapters(),
        random_ids(60, 1),
        {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD},
    )

    def asked(engine):
        expected = model.generate(input_ids=ids, **given)
        handle = engine.add(ids, **given)
        assert torch.equal(handle.result(SOON), expected)
        return handle.cached_tokens

    with Engine(model, prefix_cache=MEGABYTE) as engine:
        assert [asked(engine), asked(engine)] == [0, 59]
        change(model)
        assert [asked(engine), asked(engine)] == [0, 59]
