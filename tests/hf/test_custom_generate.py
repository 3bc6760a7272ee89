"""What transformers passes to a callable for `custom_generate=` and what it does not, as docs/exactness.md says."""

import copy
import functools
import warnings

import pytest
import torch
from same_as_plain import Listener
from transformers import StoppingCriteria, StopStringCriteria

import lade
from lade.testing import toy_model

IDS = torch.tensor([[1, 2, 1, 2, 1]])


def passes_of(model):
    """A list that gains an element with each forward pass."""
    passes = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    return passes


@pytest.fixture
def model():
    return toy_model()


REFUSED = (
    r"streamer= cannot be used with custom_generate=lade\.decode: transformers does not pass it on; give it to "
    r"lade\.decoder\(streamer=\.\.\.\) or lade\.generate\(streamer=\.\.\.\) alone, or call lade\.enable\(model\)"
)


@functools.wraps(lade.decode)
def wrapped(*arguments, **named):
    return lade.decode(*arguments, **named)


WAYS = {
    "decode": lambda streamer: lade.decode,
    "decoder": lambda streamer: lade.decoder(),
    "both": lambda streamer: lade.decoder(streamer=streamer),
    "wrapped": lambda streamer: wrapped,
}


@pytest.mark.parametrize("lookahead", ["auto", None, lade.LookaheadConfig(3, 3, 3)])
@pytest.mark.parametrize("way", WAYS)
def test_a_streamer_that_a_callable_is_not_passed_is_refused_before_any_pass(model, way, lookahead):
    listener, passes = Listener(), passes_of(model)
    arguments = {"max_new_tokens": 9, "streamer": listener, "custom_generate": WAYS[way](listener)}
    with pytest.raises(lade.UnsupportedArgumentError, match=REFUSED):
        model.generate(IDS, lookahead=lookahead, **arguments)
    assert not passes and listener.ends == 1 and listener.received == [IDS.tolist()]


def test_a_streamer_of_another_generate_around_it_is_none_of_its_own(model):
    """Such as a criterion that has a second model, or this one, go on."""

    class Asking(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            inner.append(model.generate(input_ids, max_new_tokens=3, custom_generate=lade.decode))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    inner, listener = [], Listener()
    outer = model.generate(IDS, max_new_tokens=2, streamer=listener, stopping_criteria=[Asking()])
    assert [each.shape[1] for each in inner] == [9, 10]
    assert listener.received == [IDS.tolist(), *([token] for token in outer[0, IDS.shape[1] :].tolist())]


def test_stop_strings_raise_and_their_criterion_is_served(model, letters):
    text = model.generate(IDS, max_new_tokens=20)[0, 5:].tolist()
    stop = letters.decode(text[6:8])
    expected = model.generate(IDS, max_new_tokens=20, stop_strings=stop, tokenizer=letters)
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        model.generate(IDS, max_new_tokens=20, stop_strings=stop, tokenizer=letters, custom_generate=lade.decode)
    criteria = [StopStringCriteria(letters, stop)]
    ours = model.generate(IDS, max_new_tokens=20, stopping_criteria=criteria, custom_generate=lade.decode)
    assert torch.equal(ours, expected) and expected.shape[1] <= 13


@pytest.mark.parametrize("way", ["generate", "enable", "decoder", "stream"])
def test_a_fallback_leaves_no_trace_but_one_warning_at_the_users_line(model, way):
    arguments = {"max_new_tokens": 9, "do_sample": True, "return_dict_in_generate": True, "output_hidden_states": True}
    expected, listener, stats = Listener(), Listener(), lade.Stats()
    torch.manual_seed(3)
    model.generate(IDS, streamer=expected, **arguments)
    state, passes = torch.get_rng_state(), passes_of(model)
    arguments |= {"inputs": IDS, "stats": stats}
    ways = {
        "generate": lambda: lade.generate(model, streamer=listener, **arguments),
        "enable": lambda: lade.enable(model).generate(streamer=listener, **arguments),
        "decoder": lambda: model.generate(custom_generate=lade.decoder(streamer=listener), **arguments),
        "stream": lambda: list(lade.stream(model, **arguments)),
    }
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ways[way]()
    assert [(each.category, each.filename) for each in caught] == [(lade.FallbackWarning, __file__)]
    assert "output_hidden_states" in stats.fallback and stats.new_tokens == len(passes) == 9
    assert torch.equal(torch.get_rng_state(), state)
    assert way == "stream" or (listener.received == expected.received and listener.ends == 1)


def test_what_only_model_generate_decodes_is_left_to_it_with_one_warning(model):
    """Transformers prepares it for a callable without the assistant."""
    model.generation_config.prompt_lookup_num_tokens = 3
    expected = model.generate(IDS, max_new_tokens=40)
    passes, stats = passes_of(model), lade.Stats()
    with pytest.warns(lade.FallbackWarning, match="prompt_lookup_num_tokens=3") as caught:
        ours = lade.generate(model, IDS, max_new_tokens=40, stats=stats)
    assert torch.equal(ours, expected) and len(caught) == 1 and len(passes) < 40
    again = copy.deepcopy(model)  # a fallback is reported once per model
    with pytest.warns(lade.FallbackWarning):
        ours = again.generate(IDS, max_new_tokens=40, custom_generate=lade.decode)
    assert torch.equal(ours, expected)
