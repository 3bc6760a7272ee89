"""Many prompts at a time: the answers are transformers' own, however they are decoded."""

from dataclasses import replace

import pytest
import torch
from bench_toys import models
from spies import answered

from lade_lab.harness.throughput import REFERENCE, Load
from lade_lab.results import Settings

PROMPTS = [[1, 2, 3, 1, 2], [5, 6], [7, 8, 9, 7, 8, 9, 7], [4], [10, 11, 10, 11]]
ARMS = [REFERENCE, "batches, plain", "batches, adaptive", "engine, plain", "engine, adaptive", "engine, adaptive-warm"]


@pytest.fixture(scope="module")
def toy():
    return models()


@pytest.fixture(scope="module")
def plain(toy):
    arguments = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    return [toy.plain.generate(torch.tensor([ids]), **arguments)[0, len(ids) :].tolist() for ids in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_batches_and_engines_have_the_answers_of_single_prompts(toy, plain, rows):
    trials = Load(toy, PROMPTS, Settings(12, repeats=2), 0).batches(rows)
    assert [trial.name for trial in trials] == ARMS
    for trial in trials:
        assert trial.answers == plain, trial.name
        assert (trial.parting, trial.faults, len(trial.seconds)) == (0, 0, 2)
        record = trial.as_dict(trials[0])
        assert record["tokens_per_s"] > 0 and record["latency_median_s"] is None
        assert (record["tokens_per_step"] is None) == (trial.name == REFERENCE)
    assert trials[0].as_dict(trials[0])["speedup"] == 1.0


def test_requests_that_arrive_have_latencies(toy, plain):
    trials = Load(toy, PROMPTS, Settings(12), 0).arrivals(2, rate=200.0)
    assert [trial.name for trial in trials] == [ARMS[0], *ARMS[3:]]
    for trial in trials:
        assert trial.answers == plain and len(trial.latencies) == len(PROMPTS), trial.name
        record = trial.as_dict(trials[0])
        assert 0 < record["latency_median_s"] <= record["latency_p95_s"]


@pytest.mark.slow
def test_a_wrong_answer_is_a_fault(toy, monkeypatch):
    load = Load(toy, PROMPTS, Settings(12), 0)

    def spoil(answer, load, row):
        if row[0] != row[1]:
            answer[3] = (answer[3] + 1) % 48

    trials = load.batches(2)
    assert not any(trial.faults for trial in trials)
    answered(monkeypatch, Load, "_cut", spoil)
    trials = load.batches(2)
    wrong = {trial.name: trial.faults for trial in trials}
    assert wrong["batches, plain"] == 0, "the reference has the same fault"
    assert wrong["engine, plain"] == trials[-1].parting > 0


def test_past_the_end_of_the_text_nothing_is_cut(toy):
    (first, *_) = Load(toy, PROMPTS, replace(Settings(12), ignore_eos=True), 0).batches(8)
    assert [len(answer) for answer in first.answers] == [12] * len(PROMPTS)
