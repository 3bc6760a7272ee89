"""What transformers passes to a callable for `custom_generate=` and what it does not, as docs/exactness.md says."""

import warnings

import pytest
import torch
from transformers import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

import lade
from lade.testing import toy_model

IDS = torch.tensor([[1, 2, 1, 2, 1]])


class Listener(BaseStreamer):
    def __init__(self):
        self.received, self.ended = [], False

    def put(self, value):
        self.received += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.fixture
def model():
    return toy_model()


def test_a_streamer_gets_the_prompt_alone_unless_the_decoder_knows_it(model):
    deaf, listener = Listener(), Listener()
    ids = model.generate(IDS, max_new_tokens=20, streamer=deaf, custom_generate=lade.decode)
    assert deaf.received == IDS[0].tolist() and not deaf.ended
    model.generate(IDS, max_new_tokens=20, custom_generate=lade.decoder(streamer=listener))
    assert listener.received == ids[0].tolist() and listener.ended


def test_stop_strings_raise_and_their_criterion_is_served(model, letters):
    text = model.generate(IDS, max_new_tokens=20)[0, 5:].tolist()
    stop = letters.decode(text[6:8])
    expected = model.generate(IDS, max_new_tokens=20, stop_strings=stop, tokenizer=letters)
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        model.generate(IDS, max_new_tokens=20, stop_strings=stop, tokenizer=letters, custom_generate=lade.decode)
    criteria = [StopStringCriteria(letters, stop)]
    ours = model.generate(IDS, max_new_tokens=20, stopping_criteria=criteria, custom_generate=lade.decode)
    assert torch.equal(ours, expected) and expected.shape[1] <= 13


class Passes:
    """Counts the forward passes of a model."""

    def __init__(self, model):
        self.count = 0
        model.register_forward_pre_hook(self)

    def __call__(self, *_):
        self.count += 1


@pytest.mark.parametrize("way", ["generate", "enable", "decoder", "stream"])
def test_a_fallback_leaves_no_trace_but_one_warning_at_the_users_line(model, way):
    arguments = {"max_new_tokens": 9, "do_sample": True, "return_dict_in_generate": True, "output_hidden_states": True}
    expected, listener, stats = Listener(), Listener(), lade.Stats()
    torch.manual_seed(3)
    model.generate(IDS, streamer=expected, **arguments)
    state, passes = torch.get_rng_state(), Passes(model)
    ways = {
        "generate": lambda: lade.generate(model, IDS, streamer=listener, stats=stats, **arguments),
        "enable": lambda: lade.enable(model, stats=stats).generate(IDS, streamer=listener, **arguments),
        "decoder": lambda: model.generate(
            IDS, custom_generate=lade.decoder(streamer=listener), stats=stats, **arguments
        ),
        "stream": lambda: list(lade.stream(model, IDS, stats=stats, **arguments)),
    }
    torch.manual_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ways[way]()
    assert [(each.category, each.filename) for each in caught] == [(lade.FallbackWarning, __file__)]
    assert "output_hidden_states" in stats.fallback and stats.new_tokens == passes.count == 9
    assert torch.equal(torch.get_rng_state(), state)
    assert way == "stream" or (listener.received == expected.received and listener.ended)


def test_what_only_model_generate_decodes_is_left_to_it_with_one_warning(model):
    """Transformers prepares it for a callable without the assistant."""
    model.generation_config.prompt_lookup_num_tokens = 3
    expected = model.generate(IDS, max_new_tokens=40)
    passes, stats = Passes(model), lade.Stats()
    with pytest.warns(lade.FallbackWarning, match="prompt_lookup_num_tokens=3") as caught:
        ours = lade.generate(model, IDS, max_new_tokens=40, stats=stats)
    assert torch.equal(ours, expected) and len(caught) == 1 and passes.count < 40
    with pytest.warns(lade.FallbackWarning):
        ours = model.generate(IDS, max_new_tokens=40, custom_generate=lade.decode)
    assert torch.equal(ours, expected)
