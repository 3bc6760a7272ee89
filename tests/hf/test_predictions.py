"""`prediction=` everywhere that takes one: plain decoding's tokens in fewer steps, whatever was expected."""

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import lade
from lade import ConfigError, InputError, LookaheadConfig, Stats, UnsupportedArgumentError
from lade.testing import toy_model

NEW, PAPER = 60, LookaheadConfig(4, 5, 4)
MODELS = {family: toy_model(family) for family in ("llama", "gpt2")}
MODEL = MODELS["llama"]
PROMPT = torch.tensor([[1, 2, 3, 4]])
PROMPTS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 9, 3]])
METHODS = ["auto", LookaheadConfig(budget=16), PAPER]


def answer_of(ids=PROMPT, model=MODEL, **arguments):
    """Prompts and plain decoding's answers."""
    torch.manual_seed(0)
    return model.generate(ids, max_new_tokens=NEW, **arguments)


def predicted(prediction, ids=PROMPT, model=MODEL, **arguments):
    torch.manual_seed(0)
    return lade.generate(model, ids, max_new_tokens=NEW, prediction=prediction, **arguments)


def spoiled(tokens, places):
    return [token if place not in places else (token + 1) % 48 for place, token in enumerate(tokens)]


def users(input_ids, scores):
    """A user's processor, for which rows of a batch go in lock-step: it forbids what the last token was."""
    return scores.scatter(1, input_ids[:, -1:], float("-inf"))


@settings(max_examples=examples(15))
@given(
    st.sampled_from(sorted(MODELS)),
    st.sets(st.integers(0, NEW - 1), max_size=20),
    st.sampled_from(METHODS),
    st.booleans(),
    st.integers(0, 3),
)
def test_whatever_is_expected_the_tokens_are_plains(family, places, lookahead, sampled, cut):
    model, arguments = MODELS[family], {"do_sample": True, "temperature": 0.7} if sampled else {}
    plain = answer_of(model=model, **arguments)
    expected = spoiled(plain[0, 4:].tolist(), places)
    expected = [expected, expected[10:], expected[::-1], expected[:20] + expected[35:]][cut]
    assert torch.equal(predicted(expected, model=model, lookahead=lookahead, **arguments), plain)


def test_what_comes_as_expected_takes_few_steps():
    stats, plain = Stats(), answer_of()[0, 4:].tolist()
    predicted(plain, lookahead=LookaheadConfig(budget=16), stats=stats)
    assert stats.tokens_per_step > 10
    stats.reset()
    predicted(spoiled(plain, {15, 30, 45}), lookahead=LookaheadConfig(budget=16), stats=stats)
    assert stats.tokens_per_step > 5


@pytest.mark.one_in(4)
@pytest.mark.parametrize("more", [{}, {"do_sample": True}, {"logits_processor": [users]}])
@pytest.mark.parametrize("lookahead", METHODS)
def test_each_row_of_a_batch_has_its_own(lookahead, more):
    plain = answer_of(PROMPTS, **more)
    alone, stats = Stats(), Stats()
    assert torch.equal(predicted(None, PROMPTS, lookahead=lookahead, stats=alone, **more), plain)
    assert torch.equal(predicted(plain[:, 4:], PROMPTS, lookahead=lookahead, stats=stats, **more), plain)
    if lookahead != "auto":  # which weighs what passes cost on this machine
        assert stats.tokens_per_step > 1.5 * alone.tokens_per_step
    shuffled = [plain[2, 4:].tolist(), [], plain[0, 4:].tolist()]
    assert torch.equal(predicted(shuffled, PROMPTS, lookahead=lookahead, **more), plain)


def test_several_answers_share_it_and_text_is_tokenized():
    more = {"do_sample": True, "num_return_sequences": 3, "lookahead": METHODS[1]}
    plain = answer_of(do_sample=True, num_return_sequences=3)
    assert torch.equal(predicted(plain[1, 4:], **more), plain)
    plain = answer_of()
    text, stats = "".join(chr(ord("a") + token) for token in plain[0, 4:].tolist()), Stats()
    assert torch.equal(predicted(text, tokenizer=Letters(), lookahead=METHODS[1], stats=stats), plain)
    assert stats.tokens_per_step > 10


def test_streams_callables_and_engines_take_it():
    plain, budget = answer_of(), LookaheadConfig(budget=16)
    expected = plain[0, 4:].tolist()
    steps = list(lade.stream(MODEL, PROMPT, max_new_tokens=NEW, prediction=expected, lookahead=budget))
    assert [token for step in steps for token in step.tokens] == expected
    assert sum(step.sources.count("prediction") for step in steps) > NEW / 2
    callable_ = {"custom_generate": lade.decode, "prediction": expected, "lookahead": budget, "stats": Stats()}
    assert torch.equal(MODEL.generate(PROMPT, max_new_tokens=NEW, **callable_), plain)
    assert callable_["stats"].tokens_per_step > 10
    with lade.Engine(MODEL) as engine:
        handle = engine.add(PROMPT, max_new_tokens=NEW, prediction=expected, lookahead=budget)
        assert torch.equal(handle.result(60), plain)
        assert handle.stats.tokens_per_step > 10
        with pytest.raises(ConfigError, match="prediction"):
            engine.add(PROMPT, prediction=expected, lookahead=None)


class Letters:
    """A tokenizer as far as it is needed."""

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}


@pytest.mark.parametrize(
    ("prediction", "says"),
    [
        ("text", "tokenizer="),
        (torch.zeros(1, 1, 2, dtype=torch.long), r"\[1, 1, 2\]"),
        (torch.zeros(3), "float32"),
        (7, "of type int"),
        ([[1], 2], "has 2"),
        ([["x"]], "has"),
        ([[1], [2]], "2 texts for 1 prompts"),
        ([1, 48], "id 48"),
        ([-1], "id -1"),
    ],
)
def test_what_is_no_prediction_is_refused(prediction, says):
    with pytest.raises(InputError, match=says):
        predicted(prediction, lookahead=METHODS[1])


def test_where_nothing_is_guessed_it_is_refused():
    with pytest.raises(ConfigError, match="prediction"):
        predicted([1], lookahead=None)
    with pytest.raises(ConfigError, match="prediction"):
        lade.stream(MODEL, PROMPT, prediction=[1], lookahead=None)
    with pytest.raises(UnsupportedArgumentError, match="guesses=0"):
        predicted([1], lookahead=LookaheadConfig(4, 5, 0))
    with pytest.raises(UnsupportedArgumentError, match="prediction with num_beams"):
        predicted([1], lookahead=PAPER, num_beams=2)
