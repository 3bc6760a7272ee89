"""Recurrent and hybrid families: plain decoding's tokens, and its logits at every node."""

from __future__ import annotations

import pytest
import torch
from comparing import CONFIGS, PAPER, Watch, assert_same, batch, lookahead, plain, prompt
from families import RECURRENT_FAMILIES, Family
from test_batch_families import LENGTHS, assert_same_batch
from test_serving_families import assert_served

import lade
from lade.model.support.supports import RECURRENT
from lade.model.support.tree_check import worst_error
from lade.serving.capacity import Need


def recurrent(name: str) -> Family:
    """The family of that name."""
    return next(family for family in RECURRENT_FAMILIES if str(family) == name)


CASES = [pytest.param(case, id=str(case)) for case in RECURRENT_FAMILIES]


@pytest.mark.parametrize("case", CASES)
def test_it_writes_what_plain_decoding_writes(case: Family, watch: Watch) -> None:
    model = case.build()
    assert lade.supports(model)
    stats = assert_same(model, prompt(20), CONFIGS[:3], max_new_tokens=60)
    assert stats.tokens_per_step > 1, "no guess was ever accepted"
    assert watch.branched and watch.moved, "the trees were chains: nothing was put to the test"


@pytest.mark.parametrize("case", CASES)
def test_the_logits_at_every_node_are_those_of_plain_passes(case: Family) -> None:
    model = case.build(seed=2)
    assert worst_error(model, lade.supports(model).require()) < 1e-3  # transformers' functions compute in float32


def test_every_listed_family_is_tested() -> None:
    assert {case.model_type for case in RECURRENT_FAMILIES} == RECURRENT


@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "falcon_h1", "lfm2"])
def test_batches_greedy_and_sampled(name: str) -> None:
    model = recurrent(name).build()
    first = plain(model, **batch(*LENGTHS), max_new_tokens=30)[:, 20:]
    eos = [int(first[1, 5]), int(first[3, 15])]
    assert_same_batch(model, CONFIGS[:2], max_new_tokens=30, eos_token_id=eos)
    assert_same_batch(model, CONFIGS[:1], max_new_tokens=20, do_sample=True, temperature=0.6)


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "lfm2", "jamba"])
def test_requests_that_come_and_go(name: str) -> None:
    model = recurrent(name).build()
    assert_served(model, [PAPER], pad_token_id=0, do_sample=False)


def test_sampling_draws_what_plain_decoding_draws() -> None:
    model = recurrent("qwen3_5_text").build()
    torch.manual_seed(4)
    expected = plain(model, prompt(20), do_sample=True, max_new_tokens=40)
    torch.manual_seed(4)
    assert torch.equal(lookahead(model, prompt(20), do_sample=True, max_new_tokens=40), expected)


@pytest.mark.parametrize("name", ["qwen3_5_text", "jamba"])
def test_a_cache_of_the_users_own_goes_on_where_it_ended(name: str) -> None:
    model, cache = recurrent(name).build(), lade.TreeCache()
    text = lookahead(model, prompt(20), max_new_tokens=30, past_key_values=cache)
    assert cache.get_seq_length() == text.shape[1] - 1
    longer = torch.cat([text, prompt(5, seed=1)], dim=1)
    assert torch.equal(lookahead(model, longer, past_key_values=cache), plain(model, longer))


def test_beams_are_refused() -> None:
    model = recurrent("qwen3_5_text").build()
    with pytest.raises(lade.UnsupportedArgumentError, match="recurrent layers"):
        lookahead(model, prompt(20), num_beams=2)


def test_states_count_as_memory_of_their_rows() -> None:
    model = recurrent("qwen3_5_text").build()
    cache = lade.TreeCache()
    lookahead(model, prompt(20), max_new_tokens=5, past_key_values=cache)
    states = 3 * (4 * 8 * 8 * 4 + 64 * 4 * 8)  # float32 [4, 8, 8], and float64 inputs of 64 channels
    assert cache.state_bytes == states
    with lade.Engine(model, max_rows=8, max_tokens=2000) as engine:
        capacity = engine._scheduler._capacity
        assert capacity.state_slots == -(-states // engine.token_bytes)
        need = Need(tokens=100, tree=20)
        rows = next(rows for rows in range(1, 99) if not capacity.fits([need] * (rows + 1)))
        assert rows == min(8, 2000 // (120 + capacity.state_slots))
