"""`lade.enable`: `model.generate` itself against the same model's before."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import warnings
import weakref
from threading import Thread

import pytest
import torch
from same_as_plain import Listener, Spelled
from spies import failing
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    StopStringCriteria,
    TextIteratorStreamer,
    pipeline,
)

import lade
from lade import LookaheadConfig, Stats
from lade.testing import toy_model

PAPER = LookaheadConfig(4, 4, 4)
IDS = torch.tensor([[1, 2, 1, 2, 1]])
BATCH = torch.tensor([[1, 2, 1, 2, 1], [3, 4, 5, 6, 7], [9, 9, 9, 8, 8]])


@pytest.fixture
def model():
    return toy_model()


# --- the same tokens in fewer passes ---------------------------------------------------------------------------------


@pytest.mark.one_in(5)
@pytest.mark.parametrize("lookahead", ["auto", PAPER, LookaheadConfig(budget=12)], ids=["auto", "paper", "adaptive"])
@pytest.mark.parametrize(
    ("ids", "arguments"),
    [
        (IDS, {}),
        (IDS, {"do_sample": True, "temperature": 0.8, "top_k": 10}),
        (IDS, {"return_dict_in_generate": True, "output_scores": True}),
        (IDS, {"generation_config": GenerationConfig(max_new_tokens=30, repetition_penalty=1.2, do_sample=False)}),
        (BATCH, {"eos_token_id": [3, 17, 40], "pad_token_id": 0}),
        (IDS, {"num_beams": 3}),
    ],
    ids=["greedy", "sampled", "dict", "generation_config", "batch", "beams"],
)
def test_an_enabled_model_generates_the_same_in_fewer_passes(model, ids, arguments, lookahead):
    arguments = {"max_new_tokens": 40, **arguments} if "generation_config" not in arguments else arguments
    torch.manual_seed(3)
    expected = model.generate(ids, **arguments)
    stats = Stats()
    assert lade.enable(model, "auto" if "num_beams" in arguments else lookahead, stats=stats) is model
    torch.manual_seed(3)
    ours = model.generate(ids, **arguments)
    assert stats.generations == len(ids) and stats.fallback is None
    assert stats.tokens_per_step > 1 or lookahead == "auto", "that goes by the clock"
    if arguments.get("return_dict_in_generate"):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours.scores, expected.scores, strict=True))
        ours, expected = ours.sequences, expected.sequences
    assert torch.equal(ours, expected)


def test_positional_arguments_are_those_of_generate(model):
    config, seen, stats = GenerationConfig(max_new_tokens=25, do_sample=False), [], Stats()

    def watch(input_ids, scores):
        seen.append(input_ids.shape[1])
        return scores

    expected = model.generate(IDS, config, LogitsProcessorList([watch]))
    lade.enable(model, PAPER, stats=stats)
    assert torch.equal(model.generate(IDS, config, LogitsProcessorList([watch])), expected)
    assert seen[:25] == seen[25:] and stats.generations == 1
    with pytest.raises(TypeError, match="multiple values"):
        model.generate(IDS, inputs=IDS)
    assert inspect.signature(model.generate) == inspect.signature(toy_model().generate)


def test_one_call_may_have_settings_of_its_own(model):
    usual, own = Stats(), Stats()
    lade.enable(model, stats=usual)
    model.generate(IDS, max_new_tokens=20, lookahead=None, stats=own)
    assert usual == Stats() and own.steps == 19
    with pytest.raises(lade.ConfigError, match="lookahead='fast'"):
        model.generate(IDS, max_new_tokens=20, lookahead="fast")


# --- streamers and stop strings --------------------------------------------------------------------------------------


def fails(input_ids, scores):
    raise RuntimeError("processor")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"logits_processor": LogitsProcessorList([fails])}, "processor"),
        ({"eos_token_id": "x"}, ""),
        ({"attention_mask": torch.zeros(2, 3, 5)}, ""),
        ({"num_beams": 2}, "cannot be streamed"),
        ({"no_such_argument": 1}, "no_such_argument"),
        ({"stop_strings": ["a"]}, "tokenizer"),
    ],
    ids=["while decoding", "while preparing", "a wrong mask", "beams", "an unknown argument", "no tokenizer"],
)
@pytest.mark.parametrize("lookahead", ["auto", PAPER, None], ids=["auto", "paper", "plain"])
@pytest.mark.filterwarnings("ignore::lade.FallbackWarning")
def test_a_text_iterator_streamer_ends_after_any_error(model, arguments, problem, lookahead):
    streamer, problems = TextIteratorStreamer(Spelled(), timeout=60), []
    lade.enable(model, lookahead)

    def work():
        try:
            model.generate(input_ids=IDS, max_new_tokens=30, streamer=streamer, **arguments)
        except Exception as error:
            problems.append(error)

    thread = Thread(target=work)
    thread.start()
    assert isinstance("".join(streamer), str), "its reader is let go"
    thread.join()
    assert len(problems) == 1 and problem in str(problems[0])


def test_a_streamer_is_ended_once_with_or_without_a_fallback(model):
    expected = Listener()
    model.generate(IDS, max_new_tokens=20, streamer=expected)
    lade.enable(model)
    for more, warned in (({}, 0), ({"use_cache": False}, 1), ({"custom_generate": greedy}, 1)):
        listener = Listener()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.generate(IDS, max_new_tokens=20, streamer=listener, **more)
        assert len(caught) == warned and listener.ends == 1
        assert listener.received == ([IDS.tolist()] if "custom_generate" in more else expected.received)


def test_stop_strings_as_arguments_and_in_configs(model, letters):
    text = model.generate(IDS, max_new_tokens=20)[0, 5:].tolist()
    early, late = (letters.decode(text[place : place + 2]) for place in (4, 12))
    config = GenerationConfig(max_new_tokens=20, do_sample=False, stop_strings=late)
    cases = [
        {"stop_strings": [early], "max_new_tokens": 20},
        {"generation_config": config},
        {"generation_config": config, "stop_strings": early},
        {"generation_config": config, "stop_strings": None},
        {"stop_strings": [early], "max_new_tokens": 20, "stopping_criteria": [StopStringCriteria(letters, [late])]},
    ]
    lengths = set()
    for of_model in (None, [early]):
        model.generation_config.stop_strings = of_model
        for case in [*cases, {"max_new_tokens": 20}]:
            expected = model.generate(IDS, tokenizer=letters, **case)
            stats = Stats()
            lade.enable(model, PAPER, stats=stats)
            assert torch.equal(model.generate(IDS, tokenizer=letters, **case), expected), (of_model, case)
            assert stats.generations == 1 and stats.fallback is None
            lade.disable(model)
            lengths.add(expected.shape[1])
    assert len(lengths) == 3, "early, late, and to the end"
    assert config.stop_strings == late, "the user's config is as it was"


def test_a_pipeline_streams_stops_and_answers_batches(model, letters):
    pipe = pipeline("text-generation", model=model, tokenizer=letters)
    prompts = ["ab ac ab ac ab", "ad ae af", "aj aj ai"]
    arguments = {"max_new_tokens": 20, "do_sample": False, "return_full_text": False}
    stop = pipe(prompts[0], **arguments)[0]["generated_text"][20:24]
    calls = [
        (prompts[0], {}),
        (prompts[0], {"stop_sequence": stop}),
        (prompts, {"batch_size": 3, "eos_token_id": 17}),
        (prompts, {}),
    ]
    expected = [pipe(text, **arguments, **more) for text, more in calls]
    stats = Stats()
    lade.enable(model, PAPER, stats=stats)
    assert [pipe(text, **arguments, **more) for text, more in calls] == expected
    assert stats.generations == 1 + 1 + 3 + 3 and stats.tokens_per_step > 1
    assert expected[2] != expected[3], "an end was met"
    streamer = TextIteratorStreamer(letters, skip_prompt=True, timeout=60, skip_special_tokens=True)
    thread = Thread(target=pipe, args=(prompts[0],), kwargs={"streamer": streamer, **arguments})
    thread.start()
    assert "".join(streamer) == expected[0][0]["generated_text"]
    thread.join()


# --- what is not served ----------------------------------------------------------------------------------------------


def greedy(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """A user's way of decoding, to which transformers passes no streamer: the same token again."""
    return torch.cat([input_ids, input_ids[:, -1:]], dim=1)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"custom_generate": greedy}, "custom_generate asks for another decoding method"),
        ({"assistant_model": toy_model()}, "assistant_model asks for another decoding method"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens asks for another decoding"),
        ({"use_cache": False}, "use_cache=False"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_asks_for_another_way_is_left_to_it_with_one_warning(model, arguments, reason):
    expected = model.generate(IDS, max_new_tokens=12, **arguments)
    stats = Stats()
    lade.enable(model, stats=stats)
    with pytest.warns(lade.FallbackWarning, match=reason) as caught:
        assert torch.equal(model.generate(IDS, max_new_tokens=12, **arguments), expected)
    assert len(caught) == 1 and reason in stats.fallback
    lade.enable(model, PAPER)
    with pytest.raises(lade.UnsupportedArgumentError, match=reason):
        model.generate(IDS, max_new_tokens=12, **arguments)


def test_ranks_that_go_on_together_and_continuous_batching_are_left_to_it(model, monkeypatch):
    failing(monkeypatch, type(model), "generate_batch", AssertionError("it was begun, without a look at lookahead"))
    lade.enable(model, PAPER)
    with pytest.raises(lade.UnsupportedArgumentError, match="cache_implementation='paged'"):
        model.generate(IDS, max_new_tokens=5, cache_implementation="paged")
    for lookahead, problem in ((PAPER, "synced_gpus=True makes all ranks run as many"), ("auto", "process group")):
        lade.enable(model, lookahead)
        with warnings.catch_warnings(), pytest.raises(ValueError, match=problem):
            warnings.simplefilter("ignore", lade.FallbackWarning)
            model.generate(IDS, max_new_tokens=5, synced_gpus=True)


def test_what_cannot_be_enabled_is_refused_at_once_and_a_model_in_training_falls_back():
    model = toy_model("gpt2").train()
    for lookahead, says in ((PAPER, "training mode"), ("fast", "lookahead='fast'")):
        with pytest.raises(lade.LadeError, match=says):
            lade.enable(model, lookahead)
        assert "generate" not in vars(model)
    lade.enable(model)
    with pytest.warns(lade.FallbackWarning, match="training mode"):
        model.generate(IDS, max_new_tokens=3, pad_token_id=0)


# --- on and off ------------------------------------------------------------------------------------------------------


def test_enabling_again_replaces_the_settings_and_disabling_restores_the_model(model):
    before, first, second = dict(vars(model)), Stats(), Stats()
    lade.enable(model, stats=first)
    lade.enable(model, PAPER, stats=second)
    model.generate(IDS, max_new_tokens=20)
    assert first == Stats() and second.generations == 1
    assert lade.disable(model) is model
    assert vars(model) == before
    model.generate(IDS, max_new_tokens=20)
    assert second.generations == 1
    assert lade.disable(lade.disable(model)) is model and vars(model) == before
    assert lade.disable("model") == "model"


def test_the_other_ways_of_an_enabled_model_are_what_they_were(model):
    expected = model.generate(IDS, max_new_tokens=20)
    stats, own = Stats(), Stats()
    lade.enable(model, LookaheadConfig(budget=3), stats=stats)
    given = {"input_ids": IDS, "max_new_tokens": 20, "lookahead": PAPER}
    assert torch.equal(lade.generate(model, **given, stats=own), expected)
    for callable_ in (lade.decode, lade.decoder()):
        assert torch.equal(model.generate(custom_generate=callable_, **given, stats=own), expected)
    steps = lade.stream(model, **given, stats=own)
    assert [token for step in steps for token in step.tokens] == expected[0, 5:].tolist()
    with lade.Engine(model) as engine:
        assert torch.equal(engine.add(**given).result(), expected)
    assert stats == Stats() and own.generations == 4


def test_a_generate_of_the_models_own_is_called_and_comes_back(model):
    """As a tracer puts there; transformers does the same for checkpoints with a `custom_generate` folder."""
    expected, calls = model.generate(IDS, max_new_tokens=20), []

    def traced(*args, **kwargs):
        calls.append(kwargs)
        return type(model).generate(model, *args, **kwargs)

    model.generate = traced
    stats = Stats()
    for _ in range(2):
        lade.enable(model, PAPER, stats=stats)
    assert torch.equal(model.generate(IDS, max_new_tokens=20), expected)
    assert len(calls) == 1 and stats.generations == 1 and stats.tokens_per_step > 1
    lade.disable(model)
    assert model.generate is traced and not [name for name in vars(model) if "lade" in name]


def test_a_checkpoints_own_way_of_decoding_is_left_to_it(model):
    """Transformers puts it there so; it gets the arguments of `generate` and need not know of `custom_generate`."""

    def recipe(model, input_ids, max_new_tokens):
        return torch.cat([input_ids, input_ids[:, :max_new_tokens]], dim=1)

    model.generate = functools.partial(recipe, model=model)
    expected = model.generate(input_ids=IDS, max_new_tokens=3)
    for lookahead in (lade.generate, lade.enable):
        with pytest.raises(lade.UnsupportedModelError, match="by the custom_generate of its checkpoint"):
            lookahead(model, lookahead=PAPER)
    with pytest.warns(lade.FallbackWarning, match="by the custom_generate of its checkpoint"):
        assert torch.equal(lade.generate(model, input_ids=IDS, max_new_tokens=3), expected)
    lade.enable(model)
    for _ in range(2):  # without another warning: this model has had one
        assert torch.equal(model.generate(input_ids=IDS, max_new_tokens=3), expected)
        lade.enable(model)


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_deep_copy_is_enabled_and_generates_with_its_own_weights(model):
    stats = Stats()
    lade.enable(model, LookaheadConfig(budget=12, memory=lade.Memory()), stats=stats)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(1, dims=0))
    lade.disable(model)
    expected = type(other).generate(other, IDS, max_new_tokens=30)
    assert not torch.equal(expected, model.generate(IDS, max_new_tokens=30))
    assert torch.equal(other.generate(IDS, max_new_tokens=30), expected)
    assert stats.generations == 1 and stats.tokens_per_step > 1
    lade.disable(other)
    assert "generate" not in vars(other)


def test_a_pickled_model_comes_back_as_it_was_before(model):
    expected = model.generate(IDS, max_new_tokens=20)
    stats = Stats()
    lade.enable(model, LookaheadConfig(memory=lade.Memory()), stats=stats)
    written = pickle.dumps(model)
    assert b"lade" not in written, "its reader would need this library"
    other = pickle.loads(written)
    assert torch.equal(other.generate(IDS, max_new_tokens=20), expected) and stats == Stats()
    lade.enable(other, PAPER, stats=stats)
    assert torch.equal(other.generate(IDS, max_new_tokens=20), expected) and stats.tokens_per_step > 1


def test_a_saved_model_knows_nothing_of_it(model, tmp_path):
    model.save_pretrained(tmp_path / "before")
    lade.enable(model)
    model.save_pretrained(tmp_path / "enabled")
    written = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in sorted(tmp_path.iterdir())]
    assert written[0] == written[1] and list(model.state_dict()) == list(toy_model().state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "enabled")
    assert torch.equal(loaded.generate(IDS, max_new_tokens=20), model.generate(IDS, max_new_tokens=20))


def test_an_enabled_model_can_be_forgotten():
    model = toy_model()
    lade.enable(model).generate(IDS, max_new_tokens=3)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
