"""`lade.Engine` itself: threads, arguments, closing, and what it leaves behind."""

import gc
import threading
import time
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
import torch
from families import DYNAMIC, SWITCH, family, longrope
from inside import batch_of, cache_of, force_attention
from pretend import cost_of_passes
from serving_toys import (
    LLAMA,
    METHODS,
    PAD,
    SOON,
    VOCABULARY,
    FailsAt,
    Gate,
    alone,
    engine_threads,
    new_tokens,
    random_ids,
)
from spies import failing

import lade
from lade import ConfigError, Engine, EngineClosedError, InputError, Stats, TreeCache, UnsupportedArgumentError
from lade.model.facts import CACHE
from lade.serving.scheduler import Scheduler
from lade.testing import toy_model
from lade_lab.fakes import nearly_flat_cost


@pytest.fixture
def engine():
    with Engine(LLAMA, max_rows=4, prefill_tokens=5) as engine:
        yield engine


# --- requests from many threads --------------------------------------------------------------------------------------


def test_the_seed_is_reported_and_gives_the_text_again(engine):
    state = torch.get_rng_state()
    first = engine.add(random_ids(5), do_sample=True, max_new_tokens=30)
    second = engine.add(random_ids(5), do_sample=True, max_new_tokens=30)
    assert first.seed != second.seed and new_tokens(first, random_ids(5)) != new_tokens(second, random_ids(5))
    assert torch.equal(torch.get_rng_state(), state), "torch's generator is left alone"
    assert first.tokens == alone(LLAMA, random_ids(5), first.seed, do_sample=True, max_new_tokens=30)
    assert engine.add(random_ids(5), seed=7, max_new_tokens=3).seed is None, "nothing is drawn"
    largest = engine.add(random_ids(5), seed=2**64 - 1, do_sample=True, max_new_tokens=9)
    assert new_tokens(largest, random_ids(5)) == alone(
        LLAMA, random_ids(5), 2**64 - 1, do_sample=True, max_new_tokens=9
    )


def test_stats_that_are_given_are_added_to(engine):
    stats = Stats()
    handles = [engine.add(random_ids(5, seed), stats=stats, max_new_tokens=10) for seed in range(3)]
    assert all(handle.result(SOON) is not None and handle.stats is stats for handle in handles)
    assert (stats.generations, stats.new_tokens, sum(stats.accepted)) == (3, 30, 27)


def test_the_time_to_measure_passes_is_reported_to_the_request_that_took_it(engine):
    first, second = Stats(), Stats()
    for stats in (first, second):
        engine.add([1, 2, 3], max_new_tokens=4, lookahead=lade.LookaheadConfig(), stats=stats).result()
    assert first.setup_s > 0 and second.setup_s == 0.0
    assert {1, 8} <= first.surroundings.pass_s.keys() and "A pass over 8 tokens takes" in second.explain()


def test_on_step_may_call_the_engine(engine):
    more, first_tokens = [], []

    def on_step(step):
        first_tokens.append(handles[0].tokens)
        if step.index == 0:
            more.append(engine.add(random_ids(4, 1), max_new_tokens=5))
        if step.index == 2:
            assert handles[0].cancel() and not handles[0].done()

    held = Gate()
    blocker = engine.add(random_ids(3), on_step=held, max_new_tokens=2)
    handles = [engine.add(random_ids(6), on_step=on_step, lookahead=None, max_new_tokens=20)]
    held.opened.set()
    with pytest.raises(CancelledError):
        handles[0].result(SOON)
    assert len(handles[0].tokens) == 3 and [len(tokens) for tokens in first_tokens] == [1, 2, 3]
    assert new_tokens(more[0], random_ids(4, 1)) == alone(LLAMA, random_ids(4, 1), max_new_tokens=5)
    assert blocker.result(SOON) is not None


@pytest.mark.parametrize("index", [0, 2])
def test_on_step_may_close_the_engine(index):
    engine = Engine(LLAMA)
    held = Gate()
    engine.add(random_ids(3), on_step=held, max_new_tokens=1)
    handle = engine.add(
        random_ids(6), on_step=lambda step: engine.close() if step.index == index else None, max_new_tokens=50
    )
    waits = engine.add(random_ids(6), max_new_tokens=50)
    held.opened.set()
    for ended in (handle, waits):
        with pytest.raises(CancelledError):
            ended.result(SOON)
    engine.close()
    assert not engine_threads(), "close waits for the end, though it was on_step that began it"
    assert handle.stats.steps <= index + 1, "the step that was being made when all prompts were fed"


def test_the_limits_are_found_and_told():
    with Engine(LLAMA) as engine:
        assert engine.token_bytes == 512 and engine.max_tokens > 10**5
    with Engine(LLAMA, max_tokens=200) as engine:
        assert engine.max_tokens == 200
        with pytest.raises(InputError, match=r"there is room for 200 \(0\.1 MiB\)"):
            engine.add(random_ids(5), max_new_tokens=200)


@pytest.mark.parametrize("name", ["max_rows", "max_tokens", "max_waiting", "prefill_tokens"])
@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "8"])
def test_limits_are_whole_numbers(name, wrong):
    with pytest.raises(ConfigError, match=f"{name}=.* is not valid: give a whole number >= 1"):
        Engine(LLAMA, **{name: wrong})


# --- arguments -------------------------------------------------------------------------------------------------------


class Nothing:
    def put(self, value): ...

    def end(self): ...


@pytest.mark.parametrize(
    ("more", "problem", "said"),
    [
        (
            {"num_beams": 2},
            UnsupportedArgumentError,
            "num_beams=2 cannot be used .*leave it out, or use lade.generate$",
        ),
        ({"num_return_sequences": 2, "do_sample": True}, UnsupportedArgumentError, "num_return_sequences=2 .*for each"),
        ({"streamer": Nothing()}, UnsupportedArgumentError, "streamer cannot be used with lade.Engine: give on_step"),
        ({"past_key_values": TreeCache()}, UnsupportedArgumentError, f"{CACHE} .*rows of an engine share one"),
        ({"use_cache": False}, UnsupportedArgumentError, "use_cache=False cannot be used"),
        ({"guidance_scale": 2.0}, UnsupportedArgumentError, "guidance_scale=2.0 cannot be used"),
        ({"prompt_lookup_num_tokens": 2}, UnsupportedArgumentError, "another decoding method .*use lade.generate$"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, UnsupportedArgumentError, "attention_mask that ends with 0"),
        ({"seed": -1}, ConfigError, "seed=-1 is not valid"),
        ({"seed": 2**64}, ConfigError, "seed=18446744073709551616 is not valid: give a whole number from 0 to"),
        ({"seed": 1.0}, ConfigError, "seed=1.0 is not valid"),
        ({"lookahead": "fast"}, ConfigError, "lookahead='fast' is not valid"),
        ({"stats": 3}, ConfigError, "stats=3 is not valid: give a lade.Stats"),
        ({"on_step": 3}, ConfigError, "on_step=3 is not valid: give a function that takes a Step"),
        ({"place": 3}, ConfigError, "place=3 is not valid: give a slot that reserve"),
        ({"scope": 3}, ConfigError, "scope=3 is not valid: give a text"),
        ({"client": 3}, ConfigError, "client=3 is not valid: give a text"),
        ({"stop_texts": ["a"]}, ConfigError, "tokenizer=None is not valid: give the model's tokenizer"),
        ({"stop_texts": "a", "tokenizer": Nothing()}, ConfigError, "stop_texts='a' is not valid: give a list of texts"),
        ({"stop_texts": ["a", ""], "tokenizer": Nothing()}, ConfigError, r"stop_texts=\['a', ''\] is not valid"),
        ({"stop_texts": [3], "tokenizer": Nothing()}, ConfigError, r"stop_texts=\[3\] is not valid"),
        ({"logprobs": -1}, ConfigError, "logprobs=-1 is not valid: give a whole number >= 0"),
        ({"logprobs": True}, ConfigError, "logprobs=True is not valid"),
        ({"logprobs": 2.0}, ConfigError, "logprobs=2.0 is not valid"),
        *(({"prompt_logprobs": wrong}, ConfigError, "prompt_logprobs") for wrong in (-1, True, "2")),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(engine, more, problem, said):
    with pytest.raises(problem, match=said):
        engine.add(random_ids(3), max_new_tokens=5, **more)
    assert new_tokens(engine.add(random_ids(3), max_new_tokens=5), random_ids(3))


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "input_ids is empty"),
        (torch.ones(2, 3, dtype=torch.long), r"input_ids has shape \[2, 3\]: give the ids of one prompt"),
        (torch.ones(1, 1, 3, dtype=torch.long), r"input_ids has shape \[1, 1, 3\]"),
        (torch.ones(3), r"dtype torch.float32: give ids as int64"),
        ([1, VOCABULARY], f"the id {VOCABULARY}, outside the model's vocabulary of {VOCABULARY}"),
        ([1, -1], "the id -1"),
        ("a text", r"input_ids is a text, 'a text': encode it with the tokenizer: tokenizer\("),
        (["a"], "input_ids is a text, 'a'"),
        ({"input_ids": [1]}, r"input_ids is a dict: pass its items as arguments, \*\*input_ids"),
        ([1.0], "input_ids are not integers"),
        ([[1, 2]], "input_ids are not integers"),
    ],
)
def test_a_prompt_that_nobody_could_continue(engine, prompt, said):
    with pytest.raises(InputError, match=said):
        engine.add(prompt, max_new_tokens=5)


@pytest.mark.parametrize("prompt", [[3, 1, 4], (3, 1, 4), torch.tensor([3, 1, 4]), torch.tensor([[3, 1, 4]])])
def test_a_prompt_in_any_form(engine, prompt):
    output = engine.add(prompt, max_new_tokens=8).result(SOON)
    assert torch.equal(output, LLAMA.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=8))


def test_left_padding_is_taken_off(engine):
    ids = torch.cat([torch.zeros(1, 4, dtype=torch.long), random_ids(6)], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    output = engine.add(ids, attention_mask=mask, max_new_tokens=20, pad_token_id=PAD).result(SOON)
    assert torch.equal(output, LLAMA.generate(ids, attention_mask=mask, max_new_tokens=20, pad_token_id=PAD))
    assert output[0, 10:].tolist() == alone(LLAMA, random_ids(6), max_new_tokens=20)


def test_scores_and_logits_are_those_of_plain_decoding(engine):
    wanted = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 12}
    arguments = {**wanted, "do_sample": True, "top_k": 9, "pad_token_id": PAD}
    engine.add(random_ids(9, 3), max_new_tokens=40)
    ours = engine.add(random_ids(5), seed=4, **arguments).result(SOON)
    torch.manual_seed(4)
    plain = LLAMA.generate(random_ids(5), **arguments)
    assert torch.equal(ours.sequences, plain.sequences) and ours.past_key_values is None
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(plain[name]) == 12
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours[name], plain[name], strict=True))


def test_time_is_up(engine):
    held = Gate()
    engine.add(random_ids(3), on_step=held, max_new_tokens=2)
    late = engine.add(random_ids(5), max_time=1e-6, max_new_tokens=50)
    held.opened.set()
    assert len(new_tokens(late, random_ids(5))) == 1, "the clock runs while a request waits"
    assert len(new_tokens(engine.add(random_ids(5), max_time=1e6, max_new_tokens=50), random_ids(5))) == 50


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "fields"), [("llama", DYNAMIC), ("llama", longrope()), ("phi3", longrope())])
def test_texts_that_would_change_the_frequencies_of_others(name, fields):
    model = family(name).build(**fields)
    with Engine(model, prefill_tokens=4) as engine:
        said = rf"max_length={SWITCH + 1} cannot be used .*from {SWITCH} tokens on, the length of one row"
        with pytest.raises(UnsupportedArgumentError, match=said):
            engine.add(random_ids(10), max_new_tokens=SWITCH - 9)
        handles = [engine.add(random_ids(10, seed), max_new_tokens=SWITCH - 10) for seed in range(2)]
        for seed, handle in enumerate(handles):
            assert new_tokens(handle, random_ids(10, seed)) == alone(
                model, random_ids(10, seed), max_new_tokens=SWITCH - 10
            )


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_text_longer_than_a_table_of_positions_would_fail_for_all(name):
    model = toy_model("gpt2", vocabulary=64, positions=32) if name == "gpt2" else None
    model = model or family(name).build(max_position_embeddings=32)
    with Engine(model) as engine:
        with pytest.raises(
            InputError, match=r"^prompt and answer have 34 tokens, and .* has positions for 32: give a sm"
        ):
            engine.add(random_ids(5), max_new_tokens=29)
        with pytest.raises(InputError, match="input_ids has 33 tokens"):
            engine.add(random_ids(33), max_new_tokens=1)
        handles = [engine.add(random_ids(5, seed), max_new_tokens=28) for seed in range(2)]
        for seed, handle in enumerate(handles):
            assert new_tokens(handle, random_ids(5, seed)) == alone(model, random_ids(5, seed), max_new_tokens=28)


def test_a_model_that_cannot_be_served():
    model = toy_model("llama")
    force_attention(model, "flash_attention_2")
    with pytest.raises(lade.UnsupportedModelError, match="takes no tree mask"):
        Engine(model)


def test_under_inference_mode():
    with torch.inference_mode(), Engine(LLAMA, prefill_tokens=3) as engine:
        arguments = {"max_new_tokens": 20, "repetition_penalty": 1.3, "do_sample": True, "eos_token_id": [3, 4]}
        tokens = new_tokens(engine.add(random_ids(7), seed=1, pad_token_id=PAD, **arguments), random_ids(7))
    assert tokens == alone(LLAMA, random_ids(7), 1, **arguments)


# --- closing ---------------------------------------------------------------------------------------------------------


def running_engine(**limits):
    """An engine with a request that is being decoded and one that waits."""
    engine, held = Engine(LLAMA, max_rows=1, **limits), Gate()
    handles = [engine.add(random_ids(3), on_step=held, max_new_tokens=100), engine.add(random_ids(4), max_new_tokens=9)]
    assert held.reached.wait(SOON)
    return engine, held, handles


def assert_cancelled(handles):
    for handle in handles:
        with pytest.raises(CancelledError):
            handle.result(SOON)


@pytest.mark.parametrize("threads", [1, 4])
def test_closing_ends_all_however_often(threads):
    engine, held, handles = running_engine()
    with ThreadPoolExecutor(threads) as pool:
        closing = [pool.submit(engine.close) for _ in range(threads)]
        time.sleep(0.05)
        assert not any(future.done() for future in closing), "each waits for the step that is being made"
        held.opened.set()
        for future in closing:
            future.result(SOON)
    assert not engine_threads()
    assert_cancelled(handles)
    assert handles[0].tokens == alone(LLAMA, random_ids(3), max_new_tokens=100)[: len(handles[0].tokens)] != []
    engine.close()
    with pytest.raises(EngineClosedError, match="this engine was closed: make a new one"):
        engine.add(random_ids(3), max_new_tokens=5)


def test_an_engine_that_is_forgotten():
    engine, held, handles = running_engine()
    held.opened.set()
    forgotten = weakref.ref(engine)
    del engine
    gc.collect()
    assert forgotten() is None
    assert_cancelled(handles)


def test_an_engine_that_is_forgotten_by_its_own_thread():
    holder = [Engine(LLAMA)]
    reached = threading.Event()

    def on_step(step):
        reached.wait(SOON)
        holder.clear()

    handle = holder[0].add(random_ids(3), on_step=on_step, max_new_tokens=400)
    reached.set()
    assert_cancelled([handle])


@pytest.mark.slow
def test_cancelling_while_the_engine_closes():
    for _ in range(20):
        engine = Engine(LLAMA, max_rows=1)
        handles = [engine.add(random_ids(3, seed), max_new_tokens=30) for seed in range(6)]
        with ThreadPoolExecutor(3) as pool:
            for handle in handles:
                pool.submit(handle.cancel)
            pool.submit(engine.close).result(SOON)
        assert all(handle.done() for handle in handles)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unforeseen_error_reaches_every_request(monkeypatch):
    """A bug of this library must not let anyone wait for ever."""
    engine, held, handles = running_engine()
    assert engine.problem is None
    failing(monkeypatch, Scheduler, "_forget_ended", SystemError("a bug"))
    (thread,) = engine_threads()
    held.opened.set()
    for handle in handles:
        with pytest.raises(SystemError, match="a bug"):
            handle.result(SOON)
    thread.join(SOON)
    told = engine.snapshot()
    assert str(engine.problem) == "a bug" and told.closed
    assert told.requests == {"error": 2} and told.waiting == 0
    with pytest.raises(EngineClosedError, match=r"this engine broke down \(SystemError: a bug\): make a new one"):
        engine.add(random_ids(3), max_new_tokens=5)
    engine.close()


# --- what is left behind ---------------------------------------------------------------------------------------------


def tensors():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.mark.slow
def test_many_short_requests_leave_nothing_behind():
    model = toy_model("llama", vocabulary=VOCABULARY, dtype=torch.float32)
    counts, kept = [], []
    with Engine(model, max_rows=8, max_tokens=4000) as engine:
        for _ in range(4):
            handles = []
            for number in range(250):
                method = METHODS[number % len(METHODS)]
                ids = random_ids(1 + number % 6, number)
                more = {"logits_processor": [FailsAt(ids, 2)]} if number % 50 == 0 else {}
                handles.append(engine.add(ids, lookahead=method, max_new_tokens=1 + number % 5, **more))
                if number % 25 == 1:
                    handles[-1].cancel()
            for number, handle in enumerate(handles):
                try:
                    handle.result(SOON)
                except (RuntimeError, CancelledError):
                    assert number % 50 == 0 or number % 25 == 1
            kept += [weakref.ref(handle) for handle in handles]
            del handle, handles
            deadline = time.monotonic() + SOON
            while "0 of 8 rows" not in repr(engine) and time.monotonic() < deadline:  # ends first, is forgotten then
                time.sleep(0.01)
            gc.collect()
            counts.append((len(engine_threads()), threading.active_count(), tensors()))
        deadline = time.monotonic() + SOON
        while any(ref() for ref in kept) and time.monotonic() < deadline:  # the last one ends before it is forgotten
            gc.collect()
            time.sleep(0.01)
        assert not any(ref() for ref in kept)
        assert len(set(counts[1:])) == 1, counts
        assert cache_of(batch_of(engine)).room == (0, 0)
    assert not engine_threads()
    freed = weakref.ref(engine)
    del engine
    gc.collect()
    assert freed() is None


def test_a_checkpoint_that_was_saved_without_a_cache_is_served_with_one():
    """As training with gradient checkpointing leaves it in config.json."""
    model = toy_model("llama", vocabulary=VOCABULARY)
    model.generation_config.use_cache = False
    ids, stats = random_ids(8), lade.Stats()
    expected = model.generate(input_ids=ids, max_new_tokens=20, use_cache=True)
    with Engine(model) as engine:
        assert torch.equal(engine.add(ids, max_new_tokens=20).result(SOON), expected)
        with pytest.raises(UnsupportedArgumentError, match="use_cache=False"):
            engine.add(ids, max_new_tokens=20, use_cache=False)
    ours = lade.generate(model, ids, max_new_tokens=20, lookahead=lade.LookaheadConfig(5, 4, 5), stats=stats)
    assert torch.equal(ours, expected) and stats.steps < 19


def test_kinds_of_texts_are_not_mistaken_for_each_other(monkeypatch):
    """What greedy texts yield says nothing of sampled ones; those decoded together are a kind of their own."""
    cost = nearly_flat_cost()
    cost_of_passes(monkeypatch, lambda batch: cost)
    with lade.Engine(LLAMA, max_rows=4) as engine:
        asked = {"greedy": {}, "sampled at 0.7": {"do_sample": True, "temperature": 0.7}}
        for sampling in asked.values():
            engine.add(random_ids(9), max_new_tokens=20, **sampling).result(60)
        assert cost._states.keys() == {f"engine, {kind}" for kind in asked}
        together = [engine.add(random_ids(9), max_new_tokens=90, **sampling) for sampling in asked.values()]
        for handle in together:
            handle.result(60)
        assert cost._states.keys() == {*(f"engine, {kind}" for kind in asked), "several kinds"}
