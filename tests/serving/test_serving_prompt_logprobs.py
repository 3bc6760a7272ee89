"""How likely a model finds the tokens of a prompt: what its own forward pass over all of it says."""

import pytest
import torch
from families import FAMILIES, RECURRENT_FAMILIES
from serving_toys import KNOWN_TO_THE_QUEUE, LLAMA, PAD, SOON, VOCABULARY, Driven, alone, finished, random_ids
from spies import watched

from lade import Engine, InputError, LookaheadConfig
from lade.model.runner import EagerRunner
from lade.serving import handle as client


def check(handle, model, ids, top):
    """What a handle tells of a prompt, beside the model itself."""
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].float().log_softmax(dim=-1)
    first, *others = handle.prompt_logprobs
    assert first is None and [each.token for each in others] == ids[0, 1:].tolist()
    own = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([each.logprob for each in others]), own, rtol=0, atol=1e-5)
    for each, row in zip(others, logprobs, strict=False):
        assert [value for _, value in each.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-5)
        assert all(row[token].item() == pytest.approx(value, abs=1e-5) for token, value in each.top)
        assert dict(each.top).get(each.token, each.logprob) == each.logprob, "the same number, to be compared by ="


def in_small_pieces(patch, model):
    """Tell the logits of seven tokens at a time."""
    patch.setattr(client, "PIECE_LOGITS", 7 * model.config.vocab_size)


@pytest.fixture
def small_pieces(monkeypatch):
    in_small_pieces(monkeypatch, LLAMA)


@pytest.mark.parametrize(("top", "lookahead"), [(0, "auto"), (1, LookaheadConfig(budget=8)), (5, None)])
def test_they_are_those_of_the_models_own_pass(small_pieces, top, lookahead):
    ids, arguments = random_ids(40), {"max_new_tokens": 12, "pad_token_id": PAD}
    with Engine(LLAMA, prefix_cache=2**20) as engine:
        for _ in range(2):  # the second time all of it could be taken from a text that was kept
            handle = engine.add(ids, lookahead=lookahead, prompt_logprobs=top, **arguments)
            tokens = handle.result(SOON)[0, 40:].tolist()
            check(handle, LLAMA, ids, top)
            assert handle.cached_tokens == 0 and tokens == alone(LLAMA, ids, max_new_tokens=12)
        handle = finished(engine.add(ids, lookahead=lookahead, logprobs=1, **arguments))
        assert handle.prompt_logprobs is None and handle.cached_tokens > 30


LISTED = {str(family): family for family in (*FAMILIES, *RECURRENT_FAMILIES)}
FEW = ("llama", "gemma2", "cohere", "qwen3_next", "mamba", "deepseek_v32")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in LISTED]
)
def test_they_are_those_of_any_model(monkeypatch, name):
    """Also of those that cap or scale what the head returns, keep states, or have to be fed whole prompts."""
    model = LISTED[name].build()
    in_small_pieces(monkeypatch, model)
    ids = random_ids(23)
    with Engine(model) as engine:
        handle = finished(engine.add(ids, prompt_logprobs=2, max_new_tokens=3, pad_token_id=PAD))
    check(handle, model, ids, 2)


def test_a_long_prompt_is_fed_in_pieces_between_the_steps_of_others(small_pieces, monkeypatch):
    def see(runner, rows, cache, hook=None):
        return len(rows) * (len(rows[0]) - cache.get_seq_length())

    most = watched(monkeypatch, EagerRunner, "prefill", see)
    driven, ids = Driven(LLAMA, prefill_tokens=21), random_ids(120)
    other = driven.add(random_ids(5, 1), None, max_new_tokens=40)
    driven.advance()
    most.clear()
    handle = driven.add(ids, None, max_new_tokens=4, prompt_logprobs=1)
    for seed in range(2, 5):
        driven.add(random_ids(6, seed), None, max_new_tokens=4)
    before = len(other.tokens)
    while not handle.tokens:
        driven.advance()
    assert max(most) <= 21 and most.count(7) > 12, "no more logits at a time than there is memory for"
    assert len(other.tokens) - before >= 120 // 21, "a step of the others between"
    driven.finish()
    check(handle, LLAMA, ids, 1)


def test_who_makes_room_is_told_them_all_the_same(small_pieces):
    texts = [random_ids(30, seed) for seed in range(3)]
    driven = Driven(LLAMA, max_tokens=200, headroom=1, prefill_tokens=8, prefix_cache=2**20)
    handles = [driven.add(ids, None, max_new_tokens=40, prompt_logprobs=1) for ids in texts]
    driven.finish()
    assert driven.batch.tally.snapshot(**dict.fromkeys(KNOWN_TO_THE_QUEUE, 0)).displacements > 0
    for handle, ids in zip(handles, texts, strict=True):
        check(handle, LLAMA, ids, 1)


def test_what_cannot_be_told_is_refused(monkeypatch):
    with Engine(LLAMA) as engine:
        assert engine.add([1], prompt_logprobs=1, max_new_tokens=2, pad_token_id=PAD).result(SOON).shape == (1, 3)
        monkeypatch.setattr(client, "_MOST_LOGITS", 4 * VOCABULARY)
        handle = engine.add([1, 2, 3, 4, 5], prompt_logprobs=1, max_new_tokens=2, pad_token_id=PAD)
        with pytest.raises(InputError, match="at once"):
            handle.result(SOON)
