"""What transformers passes to a callable for `custom_generate=` and what it does not, as docs/exactness.md says."""

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
