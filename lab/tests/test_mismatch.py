"""The first differing token of two answers, and near ties."""

import pytest
import torch
from bench_toys import models
from spies import answered

from lade_lab.harness.arms import Place, arms_for
from lade_lab.harness.methods import parse_all
from lade_lab.harness.mismatch import Judge, first_difference, unit_of
from lade_lab.results import Settings

PROMPT = [3, 1, 4, 1, 5]
PLACE = Place("w", "p", 1, 7, 2)
GREEDY = Settings(20)


def answer(settings, toy, seed=7, method="hf"):
    (arm,) = arms_for(parse_all([method]), toy, settings)
    return arm.complete(PROMPT, seed, settings.max_new_tokens).tokens


@pytest.mark.parametrize(
    ("expected", "found", "place"),
    [([1, 2], [1, 2], None), ([], [], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1), ([], [4], 0)],
)
def test_the_first_difference(expected, found, place):
    assert first_difference(expected, found) == place


@pytest.mark.parametrize(
    ("size", "dtype", "unit"),
    [
        (1.0, torch.bfloat16, 2.0**-7), (1.99, torch.bfloat16, 2.0**-7), (16.0, torch.bfloat16, 2.0**-3),
        (16.0, torch.float16, 2.0**-6), (5.0, torch.float32, 2.0**-21), (0.25, torch.float64, 2.0**-54),
    ],
)  # fmt: skip
def test_a_unit_in_the_last_place(size, dtype, unit):
    assert unit_of(size, dtype) == unit
    assert torch.tensor(size, dtype=dtype).double() + unit == (torch.tensor(size, dtype=dtype) + unit).double()
    assert unit_of(0.0, dtype) > 0, "no score at all has one too"


def test_a_wrong_token_is_found_with_both_scores_and_is_no_near_tie():
    toy = models()
    text = answer(GREEDY, toy)
    wrong = [*text[:6], (text[6] + 1) % 48, *text[7:]]
    judge = Judge(toy.plain, GREEDY, "hf")
    assert judge.compare(PLACE, "adaptive", PROMPT, text, list(text)) is None, "equal answers are no mismatch"
    found = judge.compare(PLACE, "adaptive", PROMPT, text, wrong)
    logits = toy.plain(torch.tensor([PROMPT + text[:6]])).logits[0, -1].detach()
    assert found is not None
    assert (found.workload, found.prompt, found.turn, found.seed, found.repeat) == ("w", "p", 1, 7, 2)
    assert (found.method, found.reference, found.place) == ("adaptive", "hf", 6)
    assert (found.expected, found.found) == (text[6], wrong[6])
    assert found.expected_score == pytest.approx(float(logits[text[6]]), rel=1e-6) == float(logits.max())
    assert found.found_score == pytest.approx(float(logits[wrong[6]]), rel=1e-6)
    assert found.ulps > 1e6 and not found.near_tie


def test_a_text_that_ends_early_is_no_near_tie():
    toy = models()
    text = answer(GREEDY, toy)
    judge = Judge(toy.plain, GREEDY, "hf")
    short = judge.compare(PLACE, "adaptive", PROMPT, text, text[:9])
    assert (short.place, short.expected, short.found) == (9, text[9], None)
    assert (short.expected_score, short.found_score, short.ulps, short.near_tie) == (None, None, None, False)
    long = judge.compare(PLACE, "adaptive", PROMPT, text[:9], text)
    assert (long.place, long.expected, long.found, long.near_tie) == (9, None, text[9], False)


@pytest.mark.parametrize(
    ("dtype", "ulps", "near"),
    [
        (torch.bfloat16, 0, True), (torch.bfloat16, 8, True), (torch.bfloat16, 9, False),
        (torch.float16, 9, False), (torch.float32, 64, True), (torch.float32, 66, False),
    ],
)  # fmt: skip
def test_rounding_explains_so_many_units(dtype, ulps, near, monkeypatch):
    """The head's scores are set by hand: two tokens so many units apart, at scores between 4 and 8."""
    toy = models(dtype=dtype)
    scores = torch.full((48,), -1.0)
    scores[10], scores[20] = 4.0 + ulps * unit_of(4.0, dtype), 4.0

    def rescore(output, *_, **__):
        output.logits = scores.to(dtype).expand_as(output.logits)

    answered(monkeypatch, toy.plain, "forward", rescore)
    found = Judge(toy.plain, GREEDY, "hf").compare(PLACE, "x", PROMPT, [10, 1], [20, 1])
    assert (found.ulps, found.near_tie) == (ulps, near)


SAMPLING = Settings(20, temperature=0.8, top_k=20, top_p=0.95, seeds=[7])


def test_when_sampling_the_drawn_token_has_the_best_score_with_its_noise():
    toy = models(dtype=torch.float32)
    for seed in (0, 7):
        text = answer(SAMPLING, toy, seed)
        judge = Judge(toy.plain, SAMPLING, "hf")
        for drawn in range(len(text)):
            scores = judge.scores([*PROMPT, *text[:drawn]], seed, drawn)
            assert int(scores.seen.argmax()) == text[drawn], (seed, drawn)
    assert text != answer(GREEDY, toy), "else nothing was drawn"


def test_scores_of_samples_are_logits_and_the_same_noise_times_the_temperature():
    toy, noise = models(dtype=torch.float32), []
    for temperature in (0.5, 2.0):
        told = Judge(toy.plain, Settings(20, temperature=temperature), "hf").scores(PROMPT, 7, 3)
        noise.append((told.seen - told.raw) / temperature)
    assert torch.allclose(noise[0], noise[1], atol=1e-4) and noise[0].std() > 0.5


def test_a_wrong_sample_is_no_near_tie_and_leaves_the_generator_alone():
    toy = models(dtype=torch.float32)
    text = answer(SAMPLING, toy)
    judge = Judge(toy.plain, SAMPLING, "hf")
    told = judge.scores([*PROMPT, *text[:4]], 7, 4)
    second = int(told.seen.argsort()[-2])
    state = torch.get_rng_state()
    found = judge.compare(PLACE, "plain", PROMPT, text, [*text[:4], second, *text[5:]])
    assert torch.equal(state, torch.get_rng_state())
    assert found.expected_score > found.found_score
    assert found.ulps > 64 and not found.near_tie
    left_out = int(told.seen.argmin())
    found = judge.compare(PLACE, "plain", PROMPT, text, [*text[:4], left_out, *text[5:]])
    assert (found.found_score, found.ulps, found.near_tie) == (None, None, False), "top-k has left it out"


def test_penalties_count_as_they_do_in_decoding():
    toy = models()
    toy.plain.generation_config.repetition_penalty = 3.0
    text = answer(GREEDY, toy)
    found = Judge(toy.plain, GREEDY, "hf").compare(PLACE, "x", PROMPT, text, [*text[:5], (text[5] + 1) % 48])
    assert found.expected_score > found.found_score
