"""Every served family with every way of using a cache once more: a kept prefix, a text that is fed again, another turn
on the cache itself, on a copy of it, on a saved one. The tokens are always plain decoding's.
"""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from comparing import lookahead, plain, prompt
from families import FAMILIES, RECURRENT_FAMILIES
from inside import counters_of, prefix_cache_of
from serving_toys import Driven
from transformers import DynamicCache

import lade
from lade.backends.user_cache import can_borrow
from lade.model.facts import ModelFacts

SMALL = lade.LookaheadConfig(budget=6)
LIMITS = {  # the function for several tokens limits dt, that for one does not
    "nemotron_h": {"time_step_min": 1.0},
    "zamba2": {"time_step_min": 1.0},
    "bamba": {"time_step_limit": (1.0, float("inf"))},
    "mamba2": {"time_step_limit": (1.0, float("inf"))},
}


def in_folder(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "itself": lambda cache: cache,
    "copied": copy.deepcopy,
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),
    "saved": in_folder,
}


def named(cases):
    return [pytest.param(case, id=str(case)) for case in cases]


ALL = named([*FAMILIES, *RECURRENT_FAMILIES])
WITH_CACHE = named(each for each in [*FAMILIES, *RECURRENT_FAMILIES] if "mamba" not in each.model_type)


@pytest.mark.one_in(151)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["ours", "transformers"])
@pytest.mark.parametrize("case", WITH_CACHE)
def test_another_turn(case, kind, way):
    """Two generations go on from a copy, and one from the cache that was copied."""
    model = case.build(**LIMITS.get(str(case), {}))
    recurrence = ModelFacts.of(model).recurrence
    theirs = DynamicCache(config=model.config)
    cache = lade.TreeCache() if kind == "ours" else DynamicCache(config=model.config)
    if kind == "transformers" and (recurrence or not can_borrow(cache)):
        with pytest.raises(lade.UnsupportedArgumentError, match="type DynamicCache"):
            lookahead(model, prompt(20), past_key_values=cache)
        return
    first = plain(model, prompt(20), max_new_tokens=20, past_key_values=theirs)
    assert torch.equal(lookahead(model, prompt(20), max_new_tokens=20, past_key_values=cache), first)
    copied = WAYS[way](cache)
    second = torch.cat([first, prompt(5, seed=1)], dim=1)
    begins_anew = (
        recurrence is not None and recurrence.forgets
    )  # where transformers does so without saying it, all is fed
    expected = plain(model, second, max_new_tokens=20, **({} if begins_anew else {"past_key_values": theirs}))
    assert torch.equal(lookahead(model, second, max_new_tokens=20, past_key_values=copied), expected)
    if copied is not cache:
        assert torch.equal(lookahead(model, second, SMALL, max_new_tokens=20, past_key_values=cache), expected)
    if not begins_anew:
        third = torch.cat([expected, prompt(3, seed=2)], dim=1)
        expected = plain(model, third, max_new_tokens=9, past_key_values=theirs)
        assert torch.equal(plain(model, third, max_new_tokens=9, past_key_values=copied), expected)


class Stops:
    """Raises when a layer, a criterion or a reader has called it so many times."""

    def __init__(self, at):
        self.left = at

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool) if kwargs else None


def interrupt(model, where, at, **arguments):
    stops = Stops(at)
    arguments |= {"lookahead": lade.LookaheadConfig(budget=12), "max_new_tokens": 60, "do_sample": False}
    if where == "criterion":
        arguments["stopping_criteria"] = [lambda ids, scores, **kwargs: stops(ids, scores=scores)]
    layers = next(part for part in model.modules() if isinstance(part, torch.nn.ModuleList) and len(part) >= 4)
    hook = layers[2].register_forward_pre_hook(stops) if where == "pass" else None
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in lade.stream(model, prompt(20), **arguments):
                if where == "reader":
                    stops()
    finally:
        if hook is not None:
            hook.remove()


RECURRENT = named(each for each in RECURRENT_FAMILIES if "mamba" not in each.model_type)


@pytest.mark.one_in(25)
@pytest.mark.parametrize("at", [2, 4, 6])
@pytest.mark.parametrize("where", ["pass", "criterion", "reader"])
@pytest.mark.parametrize("case", RECURRENT)
def test_a_turn_after_one_that_was_interrupted(case, where, at):
    """A pass over a tree that was broken off leaves the states, and nothing that a plain pass would stumble over."""
    model, cache = case.build(), lade.TreeCache()
    text = plain(model, prompt(20), max_new_tokens=60)
    interrupt(model, where, at, past_key_values=cache)
    held = cache.get_seq_length()  # none where states cannot go back: to before a lone token, or to what is known
    text = torch.cat([text[:, : max(held + 1, 21)], prompt(4, seed=1)], dim=1)
    expected = plain(model, text, max_new_tokens=12)
    recurrence = ModelFacts.of(model).recurrence
    if held and not (recurrence is not None and recurrence.forgets):
        assert torch.equal(plain(model, text, max_new_tokens=12, past_key_values=copy.deepcopy(cache)), expected)
    assert torch.equal(lookahead(model, text, max_new_tokens=12, past_key_values=cache), expected)


def check_displaced(case, prefill_tokens):
    """Rows make room for others, some while their prompts are fed, and go on."""
    model = case.build(**LIMITS.get(str(case), {}))
    driven = Driven(model, prefill_tokens, max_rows=3, headroom=3)
    capacity = driven.batch.running.capacity
    driven.batch.running.capacity = replace(capacity, max_tokens=115 + 3 * capacity.state_slots)
    for seed in range(3):
        driven.add(prompt(20, seed), (SMALL, None)[seed % 2], max_new_tokens=32, do_sample=False)
    driven.finish()
    assert counters_of(driven.batch)["displacements"]


@pytest.mark.parametrize("name", ["nemotron_h", "deepseek_v32"])
def test_what_tells_how_it_was_fed_is_fed_again_as_decoding_fed_it(name):
    check_displaced(next(case for case in [*FAMILIES, *RECURRENT_FAMILIES] if str(case) == name), 512)


@pytest.mark.one_in(31)
@pytest.mark.parametrize("prefill_tokens", [6, 512])
@pytest.mark.parametrize("case", ALL)
def test_a_text_that_is_fed_again(case, prefill_tokens):
    check_displaced(case, prefill_tokens)


@pytest.mark.one_in(37)
@pytest.mark.parametrize("max_tokens", [10**6, 280])
@pytest.mark.parametrize("case", ALL)
def test_a_kept_prefix(case, max_tokens):
    """Of a text whose keys an indexer picks, only what sees all keys is shared."""
    model = case.build(**({"index_topk": 40} if "index_topk" in case.extra else {}))
    if ModelFacts.of(model).recurrent:
        with pytest.raises(lade.UnsupportedArgumentError, match="states of its recurrent layers cannot go back"):
            lade.Engine(model, prefix_cache=10**7)
        return
    driven = Driven(model, 16, max_rows=3, max_tokens=max_tokens, headroom=3, prefix_cache=10**7)
    stem, asked = prompt(70), []
    for seed in range(4):
        ids = torch.cat([stem, prompt(3 + 2 * seed, seed + 1)], dim=1)
        asked.append(driven.add(ids, (SMALL, None)[seed % 2], max_new_tokens=30, do_sample=False))
    driven.finish()
    cached = [handle.cached_tokens for handle in asked]
    assert cached == ([0, 40, 40, 40] if "index_topk" in case.extra else [0, 70, 70, 70])
    assert max_tokens > 280 or counters_of(driven.batch)["displacements"]


@pytest.mark.parametrize("name", ["deepseek_v32"])
def test_where_fewer_keys_are_picked_than_are_worth_a_copy_nothing_is_kept(name):
    model = next(case for case in FAMILIES if str(case) == name).build(index_topk=31)
    driven = Driven(model, prefix_cache=10**7)
    asked = [driven.add(prompt(60), SMALL, max_new_tokens=9) for _ in range(2)]
    driven.finish()
    assert [handle.cached_tokens for handle in asked] == [0, 0] and not len(prefix_cache_of(driven.batch))
