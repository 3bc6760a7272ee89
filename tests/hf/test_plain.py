"""Plain decoding, counted and streamed."""

import time
from contextlib import nullcontext

import pytest
import torch
from inside import hooks_of

import lade
from lade import Stats
from lade.testing import toy_model

IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])


def fail_in_pass(model, number, problem):
    """Have the n-th forward pass raise amid its layers; return the hook that does."""
    passes = []

    def fail(*_):
        passes.append(1)
        if len(passes) == number:
            raise problem

    model.model.layers[1].register_forward_pre_hook(fail)
    return fail


def plainly(model, stats, how, **arguments):
    """All tokens that `lade.generate`, `lade.stream` or `custom_generate` comes to without lookahead."""
    arguments |= {"input_ids": IDS, "max_new_tokens": 12, "do_sample": False, "lookahead": None, "stats": stats}
    if how == "stream":
        return list(lade.stream(model, **arguments))
    if how == "decode":
        return model.generate(custom_generate=lade.decode, **arguments)
    return lade.generate(model, **arguments)


@pytest.mark.parametrize("how", ["generate", "stream", "decode"])
@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_pass_that_fails_is_no_step_and_took_no_time(at, how):
    model, stats = toy_model(), Stats()
    own = fail_in_pass(model, at, MemoryError("no more"))
    with pytest.raises(MemoryError, match="no more"):
        plainly(model, stats, how)
    assert (stats.new_tokens, stats.generations, stats.steps) == (at - 1, min(1, at - 1), max(0, at - 2))
    assert 0 <= stats.forward_s <= stats.decode_s and stats.prefill_s >= 0
    assert hooks_of(model) == [own]


@pytest.mark.parametrize("how", ["generate", "stream", "decode"])
@pytest.mark.parametrize("at", [1, 2, 7])
def test_a_pass_whose_token_was_never_emitted_is_no_step(at, how):
    def fail(input_ids, scores):
        if input_ids.shape[1] == IDS.shape[1] + at - 1:
            raise RuntimeError("the user's own")
        return scores

    stats = Stats()
    with pytest.raises(RuntimeError, match="the user's own"):
        plainly(toy_model(), stats, how, logits_processor=[fail])
    assert (stats.new_tokens, stats.steps) == (at - 1, max(0, at - 2))


def test_a_prefill_in_chunks_that_fails_has_generated_nothing():
    model, stats = toy_model(), Stats()
    fail_in_pass(model, 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        plainly(model, stats, "generate", prefill_chunk_size=3)
    assert stats == Stats()


def test_a_stream_makes_a_pass_only_when_its_reader_asks_for_a_token():
    model, passes = toy_model(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    stream = lade.stream(model, IDS, max_new_tokens=30, lookahead=None)
    for number, _ in zip(range(1, 6), stream, strict=False):
        time.sleep(0.02)  # time for several passes of a toy
        assert len(passes) == number
    stream.close()
    assert len(passes) == 5


@pytest.mark.parametrize("lookahead", [None, "auto"])
def test_a_stream_runs_under_the_autocast_of_its_caller(lookahead):
    model, dtypes = toy_model(dtype=torch.float32), set()
    model.register_forward_hook(lambda module, arguments, output: dtypes.add(output.logits.dtype))
    expects = nullcontext() if lookahead is None else pytest.warns(lade.PrecisionWarning, match=r"torch\.autocast")
    with torch.autocast("cpu", torch.bfloat16):
        with expects:
            stream = list(lade.stream(model, IDS, max_new_tokens=5, lookahead=lookahead))
        expected = model.generate(IDS, max_new_tokens=5)[0, IDS.shape[1] :].tolist()
    assert dtypes == {torch.bfloat16}
    if lookahead is None:
        assert [token for step in stream for token in step.tokens] == expected
