"""The adaptive method as users have it: one memory for many requests, and a cost of steps that is really measured."""

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from spies import watched

import lade
from lade import LookaheadConfig, Memory, Stats
from lade.testing import toy_model
from lade.tuning import cost_cache as profile

DTYPES = (torch.float32, torch.float64)
VOCABULARIES = {"llama": 48, "qwen3": 33, "gpt2": 90}  # tokens of one may be unknown to another
MODELS = {
    (family, dtype): toy_model(family, vocabulary=vocabulary, dtype=dtype)
    for family, vocabulary in VOCABULARIES.items()
    for dtype in DTYPES
}
SHARED = Memory()  # of all requests
SMALL = Memory(60_000)  # forgets all the time
requests = st.fixed_dictionaries(
    {
        "family": st.sampled_from(sorted(VOCABULARIES)),
        "prompt": st.lists(st.integers(0, 32), min_size=1, max_size=10),
        "new_tokens": st.integers(1, 40),
        "seed": st.one_of(st.none(), st.integers(0, 3)),  # few, so that texts come again; None is greedy
        "eos": st.sampled_from([None, [5], [3, 17]]),
    }
)


def output_of(generate, model, request, **arguments):
    """Ids, and the global generator's state afterwards."""
    sampling = {} if request["seed"] is None else {"do_sample": True, "temperature": 0.4}
    torch.manual_seed(request["seed"] or 0)
    ids = torch.tensor([request["prompt"]])
    ours = generate(
        model, input_ids=ids, max_new_tokens=request["new_tokens"], eos_token_id=request["eos"], **sampling, **arguments
    )
    return ours.tolist(), torch.random.get_rng_state().tolist()


def plain(model, **arguments):
    return model.generate(**arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=examples(12))
@given(st.lists(requests, min_size=2, max_size=5), st.sampled_from([SHARED, SMALL]), st.sampled_from([None, 3, 24, 64]))
def test_requests_that_share_a_memory_get_plains_tokens(dtype, several, memory, budget):
    config = LookaheadConfig(memory=memory, budget=budget)
    for request in [*several, several[0]]:  # the first one again, now that its text is known
        model = MODELS[request["family"], dtype]
        assert output_of(lade.generate, model, request, lookahead=config) == output_of(plain, model, request)


@pytest.mark.measured_cost
def test_the_cost_is_measured_once_and_saved(cache_folder, monkeypatch):
    """By the first generation of a kind of model; the next one uses it, and so does the next process."""
    prompt = {"prompt": [1, 2, 3, 4, 1, 2, 3], "new_tokens": 80, "seed": None, "eos": None}
    measured, before = watched(monkeypatch, profile, "_measured"), set(cache_folder.glob("*.json"))
    model, later = (toy_model(vocabulary=53, positions=384) for _ in range(2))  # of a shape that no other test has
    expected = output_of(plain, model, prompt)

    stats = Stats()
    assert output_of(lade.generate, model, prompt, stats=stats) == expected
    assert stats.new_tokens == 80 and len(measured) == 1
    (saved,) = set(cache_folder.glob("*.json")) - before
    assert '"LlamaForCausalLM"' in saved.read_text(encoding="utf-8")

    for again in (model, later, later):
        assert output_of(lade.generate, again, prompt) == expected
    assert len(measured) == 1
    assert set(cache_folder.glob("*.json")) - before == {saved}
