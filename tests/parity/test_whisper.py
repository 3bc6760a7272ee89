"""Whisper: each segment's decoder is fed trees, by its own loop over segments and temperatures."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from comparing import ADAPTIVE, PAPER, custom, enabled
from encoder_decoders import sound, whisper

import lade

SHORT, LONG = 40, 90
ONCE: dict[str, Any] = {"force_unique_generate_call": True}
THRESHOLDS = {"logprob_threshold": -1.0, "compression_ratio_threshold": 1.35}
CALLS: dict[str, tuple[int, dict[str, Any]]] = {
    "a segment": (SHORT, ONCE),
    "a segment with timestamps": (SHORT, {"return_timestamps": True, **ONCE}),
    "several segments": (LONG, {"return_timestamps": True}),
    "several temperatures": (LONG, {"return_timestamps": True, "temperature": (0.0, 0.4), **THRESHOLDS}),
    "a sample": (SHORT, {"temperature": 0.7, "begin_suppress_tokens": [50], "min_new_tokens": 30, **ONCE}),
    "beams": (SHORT, {"num_beams": 3, **ONCE}),
}


def arguments_of(name: str) -> dict[str, Any]:
    frames, arguments = CALLS[name]
    return {"input_features": sound(frames), "attention_mask": torch.ones(1, frames, dtype=torch.long), **arguments}


@pytest.mark.one_in(24)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CALLS)
def test_it_writes_what_plain_decoding_writes(name, backend):
    model, stats = whisper(2, backend), lade.Stats()
    assert lade.supports(model)
    torch.manual_seed(3)
    expected = model.generate(**arguments_of(name))
    torch.manual_seed(3)
    ours = custom(model, lookahead=PAPER, stats=stats, **arguments_of(name))
    assert torch.equal(ours, expected) and stats.tokens_per_step > 1
    assert stats.generations >= (2 if name.startswith("several") else 1)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", ["a segment", "several segments"])
@pytest.mark.parametrize("config", [PAPER, ADAPTIVE[0]], ids=["paper", "adaptive"])
def test_all_ways_to_call_it(name, config):
    model = whisper(2)
    expected = model.generate(**arguments_of(name))
    assert torch.equal(lade.generate(model, **arguments_of(name), lookahead=config), expected)
    assert torch.equal(enabled(model, config, **arguments_of(name)), expected)


def test_what_is_returned():
    model, arguments = whisper(2), {**arguments_of("a segment"), "return_dict_in_generate": True}
    expected = model.generate(**arguments, output_scores=True)
    ours = lade.generate(model, **arguments, output_scores=True, lookahead=PAPER)
    assert torch.equal(ours.sequences, expected.sequences)
    for layer, other in zip(ours.past_key_values, expected.past_key_values, strict=True):
        for states, plain in zip(layer, other, strict=True):
            torch.testing.assert_close(states, plain)


def test_several_sounds():
    model, features = whisper(1), sound(SHORT, rows=3)
    mask = torch.ones(3, SHORT, dtype=torch.long)
    expected = model.generate(features, attention_mask=mask, **ONCE)
    ours = lade.generate(model, input_features=features, attention_mask=mask, lookahead=PAPER, **ONCE)
    assert torch.equal(ours, expected) and len(ours) == 3


TIMES = {"return_timestamps": True}
BATCHES: dict[str, dict[str, Any]] = {
    "several temperatures": {"temperature": (0.0, 0.4), **THRESHOLDS},
    "scores of each segment": {"return_dict_in_generate": True, "output_scores": True, **TIMES},
    "several answers to each": {"num_return_sequences": 2, "do_sample": True, "temperature": 0.7, **TIMES},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("frames", [SHORT, LONG], ids=["a segment", "segments"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_batch_of_sounds_is_written_segment_by_segment(name, frames):
    mask = torch.ones(3, frames, dtype=torch.long)
    mask[1, 30:] = 0  # a sound that ends before the others do
    arguments = {"attention_mask": mask, **BATCHES[name]}
    outputs = []
    for generate in (whisper(2).generate, partial(lade.generate, whisper(2), lookahead=PAPER)):
        torch.manual_seed(3)
        outputs.append((generate(input_features=sound(frames, rows=3), **arguments), torch.get_rng_state()))
    (expected, state), (ours, our_state) = outputs
    assert torch.equal(our_state, state)
    if not isinstance(expected, torch.Tensor):
        for sequence, plain in zip(ours["segments"], expected["segments"], strict=True):
            for piece, other in zip(sequence, plain, strict=True):
                torch.testing.assert_close(piece["result"]["scores"], other["result"]["scores"])
        ours, expected = ours["sequences"], expected["sequences"]
    assert torch.equal(ours, expected)


def test_it_cannot_be_streamed():
    with pytest.raises(lade.UnsupportedArgumentError, match="WhisperForConditionalGeneration decodes segment by seg"):
        lade.stream(whisper(), **arguments_of("a segment"), lookahead=PAPER)
