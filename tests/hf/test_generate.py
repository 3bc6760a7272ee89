"""`lade.generate`, `lade.stream` and `custom_generate=lade.decode` against `model.generate`."""

import functools
import warnings
from collections import Counter

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from same_as_plain import CONFIGS, PAD, Listener, assert_same_tokens, padded, random_texts
from spies import watched
from transformers import BatchEncoding

import lade
from lade import LookaheadConfig, Memory, Stats
from lade.testing import toy_model
from lade.tuning import cost_cache

VOCABULARIES = {"llama": 48, "qwen3": 53, "gpt2": 90}  # tokens of one are unknown to another that shares its memory
MODELS = {family: toy_model(family, vocabulary=size) for family, size in VOCABULARIES.items()}
prompts = st.lists(st.integers(0, 47), min_size=1, max_size=12)


@settings(max_examples=examples(40))
@given(
    family=st.sampled_from(sorted(MODELS)),
    config=CONFIGS,
    prompt=prompts,
    new_tokens=st.integers(1, 60),
    eos=st.sampled_from([None, [5], [3, 17, 40]]),
)
def test_any_window_ngram_guesses_and_prompt_give_plains_tokens(family, config, prompt, new_tokens, eos):
    model, ids = MODELS[family], torch.tensor([prompt])
    arguments = {"max_new_tokens": new_tokens, "eos_token_id": eos}
    stats = Stats()
    ours = lade.generate(model, input_ids=ids, lookahead=config, stats=stats, **arguments)
    assert torch.equal(ours, model.generate(ids, **arguments))
    emitted = ours.shape[1] - ids.shape[1]
    assert stats.new_tokens == emitted and stats.generations == 1
    assert sum(stats.accepted) == emitted - 1
    assert len(stats.accepted) == len(stats.step_tokens) == stats.steps


def test_what_a_larger_vocabulary_has_taught_a_memory_is_not_fed_to_a_smaller_one():
    config, ids = LookaheadConfig(budget=16, memory=Memory()), torch.tensor([[1, 2, 3, 4, 1, 2, 3]])
    for family in ("gpt2", "llama"):
        expected = assert_same_tokens(MODELS[family], config, input_ids=ids, max_new_tokens=40)
        assert (int(expected.max()) >= VOCABULARIES["llama"]) == (family == "gpt2")


@pytest.fixture
def model():
    return toy_model()


@pytest.fixture
def ids():
    return torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])


@pytest.mark.parametrize("texts", [[[1, 2, 3, 4, 5, 1, 2, 3]], random_texts(4, 9)], ids=["one", "several"])
def test_the_three_ways_and_plain_agree(model, texts):
    config, arguments = LookaheadConfig(5, 4, 5), {**padded(texts), "max_new_tokens": 40, "pad_token_id": PAD}
    plain, positional = model.generate(**arguments), dict(arguments)
    outputs = [lade.generate(model, positional.pop("input_ids"), lookahead=config, **positional)]
    for more in ({}, {"lookahead": config}, {"lookahead": None}):
        outputs.append(lade.generate(model, **arguments, **more))
        for callable_ in (lade.decode, lade.decoder()):
            outputs.append(model.generate(**arguments, custom_generate=callable_, **more))
    assert all(torch.equal(output, plain) for output in outputs)
    if len(texts) == 1:
        steps = lade.stream(model, **arguments, lookahead=config)
        assert [*texts[0], *(token for step in steps for token in step.tokens)] == plain[0].tolist()


@pytest.mark.parametrize(
    ("config", "sources"),
    [(LookaheadConfig(7, 5, 7), {"bonus", "text"}), (LookaheadConfig(budget=16), {"bonus", "memory"})],
)
def test_steps_name_their_sources_and_count_what_was_fed(model, ids, config, sources):
    stats = Stats()
    steps = list(lade.stream(model, input_ids=ids, max_new_tokens=200, stats=stats, lookahead=config))
    assert [step.index for step in steps] == list(range(len(steps)))
    assert steps[0].sources == ["prefill"] and steps[0].fed == ids.shape[1]
    later = steps[1:]
    assert {source for step in later for source in step.sources} >= sources
    assert all(len(step.tokens) == len(step.sources) for step in steps)
    assert [step.fed for step in later] == stats.step_tokens
    assert [len(step.tokens) for step in later] == stats.accepted
    drafted = sum(step.fed - 1 for step in later)
    accepted = sum(source != "bonus" for step in later for source in step.sources)
    assert stats.acceptance_rate == accepted / drafted > 0
    assert stats.histogram == Counter(zip(stats.step_tokens, stats.accepted, strict=True))
    assert stats.decode_s == pytest.approx(sum(step.seconds for step in later))
    assert 0 < stats.forward_s < stats.decode_s


@pytest.mark.parametrize("lookahead", [None, "auto"])
def test_plain_decoding_fills_stats_too(model, ids, lookahead):
    stats = Stats()
    unserved = {} if lookahead is None else {"return_dict_in_generate": True, "output_hidden_states": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.FallbackWarning)
        lade.generate(model, input_ids=ids, max_new_tokens=10, stats=stats, lookahead=lookahead, **unserved)
    assert (stats.new_tokens, stats.generations, stats.steps) == (10, 1, 9)
    assert (stats.fallback is None) == (lookahead is None) and stats.acceptance_rate == 0
    assert stats.accepted == stats.step_tokens == [1] * 9
    assert stats.prefill_s > 0 and 0 < stats.forward_s <= stats.decode_s


def test_gradients_stay_switched_on_for_the_consumer_of_a_stream(model, ids):
    for _ in lade.stream(model, input_ids=ids, max_new_tokens=5):
        assert torch.is_grad_enabled()


def test_a_streamer_hears_what_plain_decoding_would_tell_it(model, ids):
    expected, through_generate, through_decoder = (Listener() for _ in range(3))
    model.generate(ids, max_new_tokens=25, streamer=expected)
    lade.generate(model, input_ids=ids, max_new_tokens=25, streamer=through_generate)
    model.generate(ids, max_new_tokens=25, custom_generate=lade.decoder(streamer=through_decoder))
    for each in (through_generate, through_decoder):
        assert (each.received, each.ends) == (expected.received, 1)


@pytest.mark.parametrize("beams", [1, 2])
def test_a_refusal_after_decoding_has_begun_is_an_error_and_no_reason_to_fall_back(model, ids, beams):
    """The streamer has got the prompt by then; to decode it plainly as well would stream it twice."""

    def refuse(*_):
        raise lade.UnsupportedModelError("not in this pass", "none")

    model.lm_head.register_forward_hook(refuse)
    listener = Listener() if beams == 1 else None
    with pytest.raises(lade.UnsupportedModelError, match="not in this pass"):
        lade.generate(model, input_ids=ids, max_new_tokens=5, num_beams=beams, streamer=listener)
    assert listener is None or (listener.received, listener.ends) == ([ids.tolist()], 1)


def test_a_broken_streamer_raises_its_own_first_error(model, ids):
    class Broken(Listener):
        def put(self, value):
            super().put(value)
            if len(self.received) == 4:
                raise BrokenPipeError("put")

        def end(self):
            super().end()
            raise ValueError("end")

    listener = Broken()
    with pytest.raises(BrokenPipeError, match="put") as caught:
        lade.generate(model, input_ids=ids, max_new_tokens=9, streamer=listener)
    assert caught.value.__context__ is None and (len(listener.received), listener.ends) == (4, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), "input_ids is empty"),
        (torch.tensor([[1, 48]]), "the id 48, outside the model's vocabulary of 48"),
        (torch.tensor([[-1, 2]]), "the id -1"),
        (torch.tensor([1, 2]), "shape"),
        (torch.tensor([[1.0, 2.0]]), "dtype"),
    ],
)
def test_bad_prompts_are_named(model, wrong, message):
    for call in (lade.generate, lade.stream):
        with pytest.raises(lade.InputError, match=message):
            call(model, input_ids=wrong, max_new_tokens=5)


def test_a_prompt_longer_than_a_table_of_positions_is_named():
    model = toy_model("gpt2", positions=16)
    with pytest.raises(lade.InputError, match="20 tokens, but GPT2LMHeadModel has positions for 16"):
        lade.generate(model, input_ids=torch.ones(1, 20, dtype=torch.long), max_new_tokens=5)


@pytest.mark.parametrize("wrong", ["fast", 3, {"window": 3}])
def test_lookahead_is_a_config_auto_or_none(model, ids, wrong):
    with pytest.raises(lade.ConfigError, match="give a LookaheadConfig"):
        lade.generate(model, input_ids=ids, lookahead=wrong)


WAYS = {
    "generate": lade.generate,
    "stream": lade.stream,
    "decode": lambda model, ids, streamer=None, **given: model.generate(
        ids, custom_generate=lade.decoder(streamer=streamer), **given
    ),
    "enable": lambda model, ids, stats=None, **given: lade.enable(model, stats=stats).generate(ids, **given),
}


@pytest.mark.parametrize("lookahead", ["auto", None, lade.LookaheadConfig(3, 3, 3)])
@pytest.mark.parametrize(
    ("way", "what"), [*((way, "stats") for way in WAYS), *((way, "streamer") for way in WAYS if way != "stream")]
)
def test_what_takes_no_figures_or_no_tokens_is_refused_before_any_pass(model, ids, way, what, lookahead):
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    with pytest.raises(lade.ConfigError, match=f"{what}=3 is not valid: give a "):
        WAYS[way](model, ids, **{what: 3}, lookahead=lookahead, max_new_tokens=3)
    assert not passes


@pytest.mark.parametrize("way", [lade.generate, lade.stream, lade.enable])
@pytest.mark.parametrize("model", [None, "gpt2", torch.nn.Linear(2, 2)], ids=str)
def test_what_does_not_generate_is_refused_as_that(way, model):
    given = () if way is lade.enable else (torch.ones(1, 3, dtype=torch.long),)
    with pytest.raises(
        lade.UnsupportedModelError, match=f"^{type(model).__name__} has no generate; give a transformers"
    ):
        way(model, *given)
    lade.release(model)


@pytest.mark.measured_cost
def test_the_cost_is_measured_once_and_saved(cache_folder, monkeypatch):
    """By the first generation of a kind of model; the next one uses it, and so does the next process."""
    given = {"input_ids": torch.tensor([[1, 2, 3, 4, 1, 2, 3]]), "max_new_tokens": 80}
    measured, before = watched(monkeypatch, cost_cache, "_measured"), set(cache_folder.glob("*.json"))
    model, later = (toy_model(vocabulary=53, positions=384) for _ in range(2))  # of a shape that no other test has
    expected = model.generate(**given)
    assert torch.equal(lade.generate(model, **given), expected) and len(measured) == 1
    (saved,) = set(cache_folder.glob("*.json")) - before
    assert '"LlamaForCausalLM"' in saved.read_text(encoding="utf-8")
    for again in (model, later, later):
        assert torch.equal(lade.generate(again, **given), expected)
    assert len(measured) == 1 and set(cache_folder.glob("*.json")) - before == {saved}


# --- prompts that are no tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [lade.generate, lade.stream])
@pytest.mark.parametrize("lookahead", ["auto", None])
@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("Once upon a time", r"a text, 'Once upon a time': encode it with the tokenizer: tokenizer\(text, return_tens"),
        (["Once", "Twice"], "a text, 'Once': encode it with the tokenizer"),
        ([1, 2, 3], r"a list: give ids as an int64 tensor \[batch, length\]"),
        ({"input_ids": torch.ones(1, 3)}, "a dict: pass its items as arguments, "),
        (BatchEncoding({"input_ids": torch.ones(1, 3)}), "a BatchEncoding: pass its items as arguments, "),
    ],
)
def test_a_prompt_that_is_no_tensor(model, way, lookahead, prompt, said):
    for call in (functools.partial(way, model, prompt), functools.partial(way, model, input_ids=prompt)):
        with pytest.raises(lade.InputError, match=f"input(s|_ids) is {said}"):
            call(lookahead=lookahead, max_new_tokens=3)
