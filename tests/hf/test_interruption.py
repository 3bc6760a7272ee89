"""A generation that is interrupted, by Ctrl-C, by an error or by its reader, leaves what plain decoding leaves."""

import functools
import itertools
import sys
from pathlib import Path

import pytest
import same_as_plain
import torch
from same_as_plain import windowed
from spies import failing
from transformers import DynamicCache, DynamicLayer

import lade
from lade import LookaheadConfig, TreeCache
from lade.testing import toy_model

MODEL = toy_model()
IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1]])
CONFIGS = [LookaheadConfig(budget=24), LookaheadConfig(7, 5, 7)]
SAMPLED = {"do_sample": True, "temperature": 0.2}
NEW_TOKENS = 20
SOME = (1, 2, 8, 9, 10, 13)
EVERY = range(1, NEW_TOKENS + 1)
CALLS = [pytest.param(SOME, id="some"), pytest.param(EVERY, id="every", marks=pytest.mark.slow)]


class Countdown:
    """Raises when it is called for the n-th time."""

    def __init__(self, at: int, problem: BaseException) -> None:
        self.left, self.problem = at, problem

    def tick(self) -> None:
        self.left -= 1
        if not self.left:
            raise self.problem


class Listener(same_as_plain.Listener):
    """Notes the tokens after the prompt; with a countdown it raises."""

    def __init__(self, countdown: Countdown | None = None) -> None:
        super().__init__()
        self.countdown = countdown

    def put(self, value):
        super().put(value)
        if self.countdown is not None and len(self.received) > 1:
            self.countdown.tick()

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.received[1:] for token in step]


def interrupting(where: str, countdown: Countdown) -> dict:
    """Arguments of a generation that the countdown interrupts."""

    def processor(input_ids, scores):
        countdown.tick()
        return scores

    def criterion(input_ids, scores, **kwargs):
        countdown.tick()
        return torch.zeros(1, dtype=torch.bool)

    arguments = {"processor": {"logits_processor": [processor]}, "criterion": {"stopping_criteria": [criterion]}}
    return arguments.get(where, {})


def assert_good_for_another_turn(cache, received, model=MODEL):
    """Whoever knows the text that was received can go on with the cache, plainly or not."""
    text = torch.cat([IDS, torch.tensor([received], dtype=torch.long), torch.tensor([[7, 9]])], dim=1)
    expected = model.generate(text, max_new_tokens=3, do_sample=False)
    assert cache.get_seq_length() < text.shape[1]
    copied = TreeCache() if isinstance(cache, TreeCache) else DynamicCache()
    for number, layer in enumerate(cache.layers):
        keys, values = (states[:, :, : layer.get_seq_length()].clone() for states in (layer.keys, layer.values))
        copied.update(keys, values, number)
    assert torch.equal(model.generate(text, max_new_tokens=3, do_sample=False, past_key_values=copied), expected)
    ours = lade.generate(
        model, text, max_new_tokens=3, do_sample=False, past_key_values=cache, lookahead=LookaheadConfig(budget=8)
    )
    assert torch.equal(ours, expected)


def interrupted_at(generate, cache, where, countdown, **arguments):
    """Run until it is interrupted.

    Returns:
        The tokens that a streamer received, and the generator's state.
    """
    arguments |= {"max_new_tokens": NEW_TOKENS, "past_key_values": cache, **interrupting(where, countdown)}
    listener = Listener(countdown if where == "streamer" else None)
    torch.manual_seed(5)
    with pytest.raises(type(countdown.problem)) as caught:
        generate(input_ids=IDS, streamer=listener, **arguments)
    assert caught.value is countdown.problem
    return listener.tokens, torch.get_rng_state()


@pytest.mark.one_in(10)
@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("where", ["processor", "criterion", "streamer"])
@pytest.mark.parametrize("calls", CALLS)
def test_at_whatever_call_it_is_interrupted_cache_generator_and_streamer_are_plains(calls, where, sampling):
    several = 0
    for number, at in enumerate(calls):
        problem = (RuntimeError("the user's own"), KeyboardInterrupt())[number % 2]
        kind, config = (DynamicCache, TreeCache)[number // 2 % 2], CONFIGS[number // 4 % 2]
        expected_cache, cache, stats = DynamicCache(), kind(), lade.Stats()
        ours = functools.partial(lade.generate, MODEL, lookahead=config, stats=stats)
        expected = interrupted_at(MODEL.generate, expected_cache, where, Countdown(at, problem), **sampling)
        received, state = interrupted_at(ours, cache, where, Countdown(at, problem), **sampling)
        assert received == expected[0] and torch.equal(state, expected[1])
        assert cache.get_seq_length() == expected_cache.get_seq_length()
        assert stats.new_tokens == len(received) - (where == "streamer")
        assert_good_for_another_turn(cache, received)
        several += max(stats.accepted, default=0) > 1
    assert several > len(calls) // 4, "else no step was interrupted amid its accepted tokens"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", [DynamicCache, TreeCache])
def test_a_pass_that_is_interrupted_amid_the_layers_leaves_the_text_before(kind, layer):
    for at in range(1, 7):
        cache, countdown, listener = kind(), Countdown(at, MemoryError("no more")), Listener()
        hook = MODEL.model.layers[layer].mlp.register_forward_pre_hook(lambda *_, countdown=countdown: countdown.tick())
        with pytest.raises(MemoryError, match="no more"):
            lade.generate(
                MODEL, IDS, max_new_tokens=30, past_key_values=cache, streamer=listener, lookahead=CONFIGS[at % 2]
            )
        hook.remove()
        assert cache.get_seq_length() == (0 if at == 1 else IDS.shape[1] + len(listener.tokens) - 1)
        assert_good_for_another_turn(cache, listener.tokens)


@pytest.mark.parametrize("kind", [DynamicCache, TreeCache])
def test_a_prefill_in_chunks_that_is_interrupted_leaves_what_was_there(kind):
    for at, held in itertools.product((1, 2, 3), (0, 5)):
        cache, countdown = kind(), Countdown(at, KeyboardInterrupt())
        if held:
            MODEL.generate(IDS[:, :held], max_new_tokens=1, past_key_values=cache)
        hook = MODEL.model.layers[1].register_forward_pre_hook(lambda *_, countdown=countdown: countdown.tick())
        with pytest.raises(KeyboardInterrupt):
            lade.generate(MODEL, IDS, max_new_tokens=20, past_key_values=cache, prefill_chunk_size=2)
        hook.remove()
        assert cache.get_seq_length() == held
        assert_good_for_another_turn(cache, [])


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", [DynamicCache, TreeCache])
@pytest.mark.parametrize("lookahead", [*CONFIGS, None], ids=["adaptive", "paper", "plain"])
def test_a_reader_who_stops_finds_the_text_that_he_has_read(kind, lookahead):
    for passes in range(1, 8):
        cache = kind()
        torch.manual_seed(2)
        steps = lade.stream(MODEL, IDS, max_new_tokens=30, past_key_values=cache, lookahead=lookahead, **SAMPLED)
        read = [token for step in itertools.islice(steps, passes) for token in step.tokens]
        steps.close()
        state = torch.get_rng_state()
        torch.manual_seed(2)
        MODEL.generate(IDS, max_new_tokens=len(read), **SAMPLED)
        assert torch.equal(state, torch.get_rng_state()), "nothing was drawn for text that nobody asked for"
        assert cache.get_seq_length() == IDS.shape[1] + len(read) - 1
        assert_good_for_another_turn(cache, read)


@pytest.mark.parametrize("kind", [DynamicCache, TreeCache])
def test_an_interrupted_stream_leaves_no_text_that_its_reader_does_not_know(kind):
    """Ctrl-C amid a step: its tokens are never yielded, so the cache must not hold them."""
    for at in (2, 8, 9, 10, 13, 16):
        arguments, cache, read = interrupting("criterion", Countdown(at, KeyboardInterrupt())), kind(), []
        arguments |= {"max_new_tokens": 30, "past_key_values": cache, "do_sample": False}
        steps = lade.stream(MODEL, IDS, lookahead=CONFIGS[at % 2], **arguments)
        with pytest.raises(KeyboardInterrupt):
            for step in steps:
                read += step.tokens
        assert_good_for_another_turn(cache, read)


@pytest.mark.parametrize("held", [0, 6])
@pytest.mark.parametrize("with_config", [False, True])
def test_memory_that_runs_out_as_a_cache_is_given_back_leaves_it_as_it_was(with_config, held, monkeypatch):
    model = windowed(num_hidden_layers=3)
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    if held:
        model.generate(IDS[:, :held], max_new_tokens=1, past_key_values=cache)
    kind = type(cache.layers[0]) if cache.layers else DynamicLayer
    with monkeypatch.context() as patch:
        failing(patch, kind, "update", MemoryError("no more"), calls={3})
        with pytest.raises(MemoryError, match="no more"):
            lade.generate(model, IDS, max_new_tokens=5, past_key_values=cache, lookahead=CONFIGS[1])
    assert {layer.get_seq_length() for layer in cache.layers} <= {held} and cache.get_seq_length() == held
    text = torch.cat([IDS, torch.tensor([[7, 9]])], dim=1)
    assert torch.equal(
        lade.generate(model, text, max_new_tokens=9, past_key_values=cache, lookahead=CONFIGS[0]),
        model.generate(text, max_new_tokens=9),
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize("where", ["processor", "criterion", "model"])
def test_a_search_of_beams_that_is_interrupted_leaves_an_empty_cache(where):
    beams = {"num_beams": 3, "max_new_tokens": 12, "lookahead": LookaheadConfig(3, 3, 3)}
    for at in range(1, 8):
        cache, countdown = TreeCache(), Countdown(at, KeyboardInterrupt())
        hook = MODEL.model.layers[1].register_forward_pre_hook(
            lambda *_, countdown=countdown: countdown.tick() if where == "model" else None
        )
        try:
            lade.generate(MODEL, IDS, past_key_values=cache, **beams, **interrupting(where, countdown))
        except KeyboardInterrupt:
            assert cache.get_seq_length() == 0 and not cache.layers
            hook.remove()
            assert_good_for_another_turn(cache, [])
        else:
            assert where == "model" and at > 2, "fewer passes than tokens"
        hook.remove()


# --- Ctrl-C anywhere -------------------------------------------------------------------------------------------------

PACKAGE = Path(lade.__file__).parent
HOLDERS = {
    str(PACKAGE / file)
    for file in """
    hf/generate.py hf/processors.py decoding/loop.py decoding/row.py decoding/verify.py
    model/kv_cache.py model/cache_layers.py backends/user_cache.py model/runner.py
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
}
"""The code that handles the cache."""
assert all(Path(file).is_file() for file in HOLDERS)


class Interrupter:
    """Raises `KeyboardInterrupt` before the n-th line of `HOLDERS`; 0 never does.

    Attributes:
        lines: that were come to.
    """

    def __init__(self, at: int = 0) -> None:
        self.at, self.lines = at, 0

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _call(self, frame, event, argument):
        return self._line if frame.f_code.co_filename in HOLDERS else None

    def _line(self, frame, event, argument):
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self._line


def interrupted(at, kind):
    """A generation with Ctrl-C at a line; returns how many lines there were."""
    cache, listener = kind(), Listener()
    interrupter, arguments = Interrupter(at), {"max_new_tokens": 9, "do_sample": False, "lookahead": CONFIGS[0]}
    try:
        with interrupter:
            lade.generate(MODEL, IDS, past_key_values=cache, streamer=listener, **arguments)
    except KeyboardInterrupt:
        assert_good_for_another_turn(cache, listener.tokens)
    return interrupter.lines


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DynamicCache, TreeCache])
def test_ctrl_c_at_any_line_leaves_text(kind):
    lines = interrupted(0, kind)
    assert lines > 500
    for at in range(1, lines, lines // 200):
        interrupted(at, kind)
