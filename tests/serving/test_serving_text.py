"""What requests are told beside ids: their text, where stop texts cut it, and log-probabilities."""

import functools
import random

import pytest
import torch
from serving_toys import LLAMA, METHODS, PAD, SOON, VOCABULARY, alone, finished, random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from lade import Engine
from lade.embedded import model_path
from lade.hf.detokenizer import AnswerText
from lade.server.sampling_parameters import Penalties

PROMPTS = ("Once upon a time", "def main(", "The café — naïve “quotes” 😀😀 ", "import")


@functools.cache
def embedded():
    """The embedded model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(model_path())


@functools.cache
def plain_answer(prompt, seed, tokens):
    """Ids of the prompt, and of the answer of plain decoding."""
    model, tokenizer = embedded()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    torch.manual_seed(seed)
    answer = model.generate(ids, do_sample=True, max_new_tokens=tokens, pad_token_id=0)[0, ids.shape[1] :]
    return ids, answer.tolist()


class Letters:
    """A tokenizer of a few letters, and a special token."""

    pieces = ("a", "b", "c", " ", "ab", "ca", "bc ", "<end>")

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.pieces[i] for i in ids if not (skip_special_tokens and i == 7))


def read(stops, ids, **more):
    """The pieces, and the number of tokens until a stop text was complete."""
    text, taken = AnswerText(Letters(), (), stops, **more), []
    for number, token in enumerate(ids, start=1):
        done = text.add(token)
        if done or number == len(ids):
            text.finish()
        taken += text.taken(1)
        if done:
            break
    return taken, text.stop


# --- stop texts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stops", "ids", "pieces", "stop"),
    [
        ([], [0, 1, 2], ["a", "b", "c"], None),
        (["bc"], [0, 1, 2, 0], ["a", "", ""], "bc"),
        (["bc"], [0, 1, 0, 1], ["a", "", "ba", "b"], None),  # the last beginning is kept after all
        (["bc"], [4, 6, 0], ["a", "b"], "bc"),
        (["b", "abc"], [4, 2], ["a"], "b"),  # it is complete before the longer one, though that begins earlier
        (["ca b"], [5, 3, 0], ["", "", "ca a"], None),
        (["aab"], [0, 0, 0, 1], ["", "", "a", ""], "aab"),
        ([" ", "bc"], [0, 6], ["a", ""], "bc"),
        (["<end>"], [0, 7, 1], ["a", "", "b"], None),
        (["c"], [5], [""], "c"),
    ],
)
def test_where_a_stop_text_cuts(stops, ids, pieces, stop):
    assert read(stops, ids) == (pieces, stop)


def test_special_tokens_may_be_text():
    assert read(["<end>"], [0, 7, 1], skip_special_tokens=False) == (["a", ""], "<end>")


def cut(tokenizer, ids, answer, stops, most):
    """What a reader of all of plain decoding's answer would make of it: tokens, text, stop text and reason."""
    text = AnswerText(tokenizer, ids[0].tolist())
    shown, end = "", tokenizer.eos_token_id
    for number, token in enumerate(answer[:most], start=1):
        text.add(token)
        shown += text.taken(1)[0]
        places = [(shown.find(stop), stop) for stop in stops if stop in shown]
        if token == end or places or number == most:
            if not places:
                whole = AnswerText(tokenizer, ids[0].tolist())
                shown = whole._detokenizer.whole(answer[:number])
            reason = "eos" if token == end else "stop_text" if places else "length"
            return number, shown[: min(places)[0]] if places else shown, min(places)[1] if places else None, reason
    raise AssertionError


@pytest.mark.parametrize("cases", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_stops_and_lengths_are_exact(cases):
    """Random texts, stop texts out of them, and lengths; with wide trees that reach beyond the end."""
    model, tokenizer = embedded()
    rng, asked = random.Random(5), []
    with Engine(model, max_rows=8) as engine:
        for number in range(cases):
            seed = rng.randrange(1 + cases // 50)
            ids, answer = plain_answer(PROMPTS[number % len(PROMPTS)], seed, 48)
            whole = tokenizer.decode(answer)
            places = [rng.randrange(len(whole)) for _ in range(rng.randint(1, 3))]
            stops = [whole[place : place + rng.choice((1, 2, 3, 5, 9))] for place in places] + ["\n\n\n"]
            most = rng.choice((1, 2, 7, 20, 48))
            handle = engine.add(
                ids,
                stop_texts=stops,
                tokenizer=tokenizer,
                seed=seed,
                do_sample=True,
                max_new_tokens=most,
                pad_token_id=0,
                lookahead=METHODS[number % len(METHODS)],
            )
            asked.append((handle, cut(tokenizer, ids, answer, stops, most), ids, answer, stops))
        for handle, (tokens, text, stop, reason), ids, answer, stops in asked:
            result = handle.result(SOON)
            assert result[0, ids.shape[1] :].tolist() == handle.tokens == answer[:tokens]
            assert (handle.text, handle.stop_text, handle.reason) == (text, stop, reason)
            steps = list(handle)
            assert all(len(step.texts) == len(step.tokens) for step in steps) and handle.stats.new_tokens == tokens
            shown = ""
            for step in steps:
                shown += "".join(step.texts)
                assert text.startswith(shown) and not any(each in shown for each in stops)


def test_the_text_alone():
    model, tokenizer = embedded()
    ids, answer = plain_answer(PROMPTS[2], 0, 48)
    with Engine(model) as engine:
        arguments = {"seed": 0, "do_sample": True, "max_new_tokens": 48, "pad_token_id": 0}
        handle = engine.add(ids, stop_texts=[], tokenizer=tokenizer, **arguments)
        assert handle.result(SOON)[0, ids.shape[1] :].tolist() == answer
        before, whole = (tokenizer.decode([*ids[0], *new], skip_special_tokens=True) for new in ([], answer))
        assert before + handle.text == whole != before and handle.stop_text is None
        other = engine.add(ids, **arguments)
        assert other.result(SOON) is not None and other.text == "" and all(step.texts is None for step in other)


def test_the_criterion_ends_plain_decoding_likewise():
    model, tokenizer = embedded()
    ids, answer = plain_answer(PROMPTS[0], 0, 48)
    stop = tokenizer.decode(answer)[30:34]
    torch.manual_seed(0)
    criterion = AnswerText(tokenizer, ids[0].tolist(), [stop])
    more = {"do_sample": True, "max_new_tokens": 48, "pad_token_id": 0}
    plain = model.generate(ids, stopping_criteria=[criterion], **more)
    with Engine(model) as engine:
        handle = engine.add(ids, stop_texts=[stop], tokenizer=tokenizer, seed=0, **more)
        assert torch.equal(handle.result(SOON), plain) and plain.shape[1] < ids.shape[1] + 48
    assert "".join(criterion.taken(100)) == handle.text and criterion.stop == handle.stop_text == stop


def test_a_stop_text_among_other_criteria():
    """One that has to see tensors: then all are called as plain decoding does."""
    model, tokenizer = embedded()
    ids, answer = plain_answer(PROMPTS[0], 0, 48)
    stop = tokenizer.decode(answer)[30:34]
    with Engine(model) as engine:
        more = {"do_sample": True, "max_new_tokens": 48, "pad_token_id": 0, "seed": 0, "tokenizer": tokenizer}
        alone_ = engine.add(ids, stop_texts=[stop], **more)
        among = engine.add(ids, stop_texts=[stop], max_time=1e6, stop_strings=["~~~never~~~"], **more)
        strung = engine.add(ids, stop_strings=[stop], **more)
        assert torch.equal(alone_.result(SOON), among.result(SOON)) and torch.equal(
            strung.result(SOON), among.result(0)
        )
        assert (alone_.text, alone_.stop_text, alone_.reason) == (among.text, stop, "stop_text")
        assert among.reason == "stop_text"


# --- log-probabilities -----------------------------------------------------------------------------------------------


def expected_logprobs(model, ids, answer):
    """`[T, V]`, by one plain forward."""
    with torch.no_grad():
        logits = model(torch.cat([ids, torch.tensor([answer])], dim=1)).logits[0, ids.shape[1] - 1 : -1]
    return logits.float().log_softmax(dim=-1)


WITH_LOGPROBS = (
    {},
    {"do_sample": True, "temperature": 0.7, "top_k": 5},
    {"repetition_penalty": 1.4, "bad_words_ids": [[3]]},
    {"logits_processor": [Penalties(0.5, 0.5, prompt_length=6)]},
    {"eos_token_id": list(range(12))},
)


@pytest.mark.parametrize(("arguments", "method"), list(zip(WITH_LOGPROBS, METHODS, strict=False)))
def test_logprobs_are_those_of_the_raw_logits(arguments, method):
    arguments = {"max_new_tokens": 24, **arguments}
    with Engine(LLAMA, prefill_tokens=4) as engine:
        handles = [
            engine.add(random_ids(6, n), lookahead=method, seed=1, logprobs=n, pad_token_id=PAD, **arguments)
            for n in (0, 5)
        ]
        without = engine.add(random_ids(6, 5), lookahead=method, seed=1, pad_token_id=PAD, **arguments)
        for handle, top in zip(handles, (0, 5), strict=True):
            handle.result(SOON)
            rows = expected_logprobs(LLAMA, random_ids(6, top), handle.tokens)
            told = [each for step in handle for each in step.logprobs]
            assert [each.token for each in told] == handle.tokens
            assert all(len(step.logprobs) == len(step.tokens) for step in handle)
            for row, each in zip(rows, told, strict=True):
                assert abs(each.logprob - float(row[each.token])) < 1e-5
                values, _ = row.topk(top)
                assert [value for _, value in each.top] == pytest.approx(values.tolist(), abs=1e-5)
                assert all(abs(float(row[token]) - value) < 1e-5 for token, value in each.top)
        without.result(SOON)
        assert without.tokens == handles[1].tokens and all(step.logprobs is None for step in without)
    assert without.tokens == alone(LLAMA, random_ids(6, 5), 1, **arguments)


def test_more_logprobs_than_there_are_ids():
    with Engine(LLAMA) as engine:
        handle = finished(engine.add(random_ids(3), max_new_tokens=3, logprobs=1000))
        assert all(len(each.top) == VOCABULARY for step in handle for each in step.logprobs)
