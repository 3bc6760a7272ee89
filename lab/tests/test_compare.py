"""Runs are made up: what a sample says is known, and so is the noise on it."""

import copy
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from lade.errors import ConfigError, InputError
from lade_lab.compare import compare, drift, interval_of
from lade_lab.results import Environment, Method, Model, Results, Sample, Settings, Workload
from lade_lab.summary import CALL

METHODS = {"hf": 1, "adaptive": 2, "lookahead": 2}  # tokens per step


def sample(method, prompt, seconds, *, repeat=0, workload="stories"):
    per_step = METHODS[method]
    return Sample(
        workload=workload, prompt=prompt, turn=0, prompt_sha256=f"sha {prompt}", prompt_tokens=5, method=method, seed=0,
        repeat=repeat, new_tokens=101, seconds=seconds + 0.5, prefill_s=0.5, decode_s=seconds, forward_s=0.9 * seconds,
        steps=100 // per_step, step_tokens=[8] * (100 // per_step), accepted=[per_step] * (100 // per_step), sources=[],
        distinct_4grams=1.0, output_sha256=f"text {prompt}",
    )  # fmt: skip


def run(prompts=20, repeats=1, *, slower=None, noise=0.0, machine=1.0, seed=0, workloads=("stories",)):
    """A run; `slower`: seconds of a method times a factor; `noise`: standard deviation of the seconds' logarithm."""
    generator, samples = np.random.default_rng(seed), []
    for workload, prompt, repeat, method in product(workloads, range(prompts), range(repeats), METHODS):
        seconds = machine * (slower or {}).get(method, 1.0) * (1 + prompt / prompts)
        seconds *= math.exp(noise * generator.normal())
        samples.append(sample(method, f"p{prompt}", seconds, repeat=repeat, workload=workload))
    return Results(
        "2026-01-01T00:00:00+00:00", ["lade", "bench"],
        Environment("a machine", 1, {"torch": "2.13.0"}, "Linux", None), Model("small", "llama", 3_000_000, "float32"),
        Settings(101, repeats=repeats), [Workload(name, "jsonl", prompts) for name in workloads],
        [Method(name, name) for name in METHODS], "hf", True, samples,
    )  # fmt: skip


def slower_where(results, factor, where):
    """The same run, in which some samples take so many times as long."""
    samples = [replace(s, decode_s=factor * s.decode_s) if where(s) else s for s in results.samples]
    return replace(results, samples=samples)


def verdicts(comparison):
    return {change.method: change.verdict for change in comparison.changes}


def test_a_run_and_itself_do_not_differ_and_the_same_files_give_the_same_answer():
    found = compare(run(noise=0.1), run(noise=0.1), tolerance=0.0)
    assert set(verdicts(found).values()) == {"no difference seen"} and found.failures == []
    assert all(change.rate.ratio == 1.0 and not change.paths and not change.texts for change in found.changes)
    assert (found.warnings, found.forced, found.only_a, found.only_b) == ((), (), (), ())
    a, b = run(noise=0.1, seed=1), run(noise=0.1, seed=2)
    assert compare(a, b) == compare(a, b) != compare(a, b, seed=1)


def test_a_method_that_got_slower_is_found_and_only_it_and_one_that_got_faster_does_not_fail():
    found = compare(run(noise=0.02, seed=3), run(noise=0.02, seed=4, slower={"adaptive": 1.1}))
    assert verdicts(found) == {"hf": "no difference seen", "adaptive": "slower", "lookahead": "no difference seen"}
    (failure,) = found.failures
    assert failure.method == "adaptive" and failure.interval.low < 1 / 1.1 < failure.interval.high
    found = compare(run(noise=0.02, seed=1), run(noise=0.02, seed=2, slower={"adaptive": 1 / 1.1}))
    assert verdicts(found)["adaptive"] == "faster" and not found.failures


def test_within_the_tolerance_slower_does_not_fail():
    a, b = run(noise=0.002, seed=1), run(noise=0.002, seed=2, slower={"adaptive": 1.04})
    assert compare(a, b, tolerance=0.03).failures
    found = compare(a, b, tolerance=0.05)
    assert verdicts(found)["adaptive"] == "slower" and not found.failures


def test_a_slower_machine_is_cancelled_by_the_reference():
    a, b = run(noise=0.02, seed=1), run(noise=0.02, seed=2, machine=1.3)
    found = compare(a, b)
    assert not found.failures and drift(found) == pytest.approx(1 / 1.3, rel=0.03)
    assert {change.method: change.judged for change in found.changes}["hf"] == "reference"
    assert next(c for c in found.changes if c.method == "adaptive").rate.verdict == "slower", "which is shown"
    absolute = compare(a, b, absolute=True)
    assert {failure.method for failure in absolute.failures} == set(METHODS) and drift(absolute) is None


def test_without_a_shared_reference_another_plain_method_is_taken_or_rates_are_judged():
    a, b = run(seed=1, noise=0.02), run(seed=2, noise=0.02, slower={"adaptive": 1.2})
    b.samples = [each for each in b.samples if each.method != "hf"]
    found = compare(a, b)
    assert found.reference is None and found.only_a == ("method 'hf'",)
    assert [failure.method for failure in found.failures] == ["adaptive"]
    a, b = run(seed=1, noise=0.02), run(seed=2, noise=0.02, machine=2.0)
    b.reference, a.reference = "adaptive", "gone"
    assert compare(a, b).reference == "adaptive"
    b.reference = "gone too"
    assert compare(a, b).reference == "hf"


def test_the_more_is_compared_the_wider_are_intervals():
    """Else a run of many methods on many workloads would nearly always have a false alarm."""
    a, b = (run(noise=0.1, seed=seed, workloads=("stories", "code", "chat", "sums")) for seed in (1, 2))
    wide = compare(a, b).changes[1].interval
    a.samples, b.samples = ([each for each in r.samples if each.workload == "stories"] for r in (a, b))
    narrow = compare(a, b).changes[1].interval
    assert narrow.ratio == wide.ratio and wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.slow
def test_intervals_hold_as_often_as_they_say():
    """Skewed noise, few values: of 400 intervals that may miss in one of ten, 40 ± 6 should."""
    generator = np.random.default_rng(5)
    misses = 0
    for _ in range(400):
        found = interval_of(0.05 + 0.1 * (generator.exponential(size=12) - 1.0), 0.1, generator)
        misses += not found.low <= math.exp(0.05) <= found.high
    assert 20 <= misses <= 64


def test_one_answer_says_nothing_and_equal_ratios_say_all():
    lonely = compare(run(1), run(1, slower={"adaptive": 2.0}))
    assert not lonely.failures and verdicts(lonely)["adaptive"] == "no difference seen"
    assert next(c for c in lonely.changes if c.method == "adaptive").speedup.high == math.inf
    (failure,) = compare(run(2), run(2, slower={"adaptive": 1.1})).failures
    assert failure.interval.low == failure.interval.high == pytest.approx(1 / 1.1)


def test_of_few_prompts_each_answer_counts():
    """Two prompts would say nothing by themselves; eight speak for others like them."""
    a, b = run(2, repeats=8, noise=0.02, seed=1), run(2, repeats=8, noise=0.02, seed=2, slower={"adaptive": 1.2})
    (failure,) = compare(a, b).failures
    assert failure.method == "adaptive" and failure.interval.units == 16
    assert compare(run(7, repeats=2), run(7, repeats=2)).changes[0].rate.units == 14
    assert compare(run(8, repeats=2), run(8, repeats=2)).changes[0].rate.units == 8


def test_one_hiccup_in_several_repeats_does_not_count():
    a, b = run(repeats=3, noise=0.001, seed=1), run(repeats=3, noise=0.001, seed=2)
    b = slower_where(b, 9, lambda sample: (sample.repeat, sample.method) == (1, "adaptive"))
    assert compare(a, b).changes[1].rate.ratio == pytest.approx(1.0, abs=0.01)


def test_answers_are_paired_one_by_one():
    """Prompts take from one to two seconds; in another order, and with half of them, nothing is slower."""
    a, b = run(), run(slower={"adaptive": 1.01})
    b.samples = b.samples[len(b.samples) // 2 :][::-1]
    found = compare(a, b)
    assert {change.method: change.pairs for change in found.changes} == dict.fromkeys(METHODS, 10)
    assert [change.method for change in found.changes] == list(METHODS)
    assert found.changes[1].rate.ratio == pytest.approx(1 / 1.01)
    assert len(found.only_a) == 10 and found.only_a[0] == "prompt 'p0' of stories"


def test_workloads_are_told_apart():
    a, b = (run(workloads=("stories", "code"), noise=0.01, seed=seed) for seed in (1, 2))
    b = slower_where(b, 1.2, lambda sample: (sample.workload, sample.method) == ("code", "lookahead"))
    (failure,) = compare(a, b).failures
    assert (failure.workload, failure.method) == ("code", "lookahead")


def test_the_whole_call_can_be_compared():
    a, b = run(), run()
    b.samples = [replace(each, seconds=2 * each.seconds) for each in b.samples]
    assert not compare(a, b, absolute=True).failures
    assert compare(a, b, absolute=True, clock=CALL).changes[0].rate.ratio == pytest.approx(0.5)


def test_one_step_more_is_seen():
    a, b = run(), run()
    changed = next(i for i, each in enumerate(b.samples) if each.method == "adaptive")
    accepted = [1, 1, *b.samples[changed].accepted[1:]]
    b.samples[changed] = replace(b.samples[changed], accepted=accepted, steps=51, step_tokens=[8] * 51)
    change = compare(a, b).changes[1]
    assert (change.steps_before.tokens, change.steps_before.passes) == (2000, 1000)
    assert (change.steps_after.tokens, change.steps_after.passes, change.paths) == (2000, 1001, 1)
    assert change.steps_after.tokens_per_step == 2000 / 1001
    assert [each.paths for each in compare(a, b).changes] == [0, 1, 0]


def test_other_texts_and_other_prompts_are_told():
    a, b = run(), run()
    b.samples[0] = replace(b.samples[0], output_sha256="else")
    b.samples[5] = replace(b.samples[5], prompt_sha256="else")
    found = compare(a, b)
    assert [change.texts for change in found.changes] == [1, 0, 0]
    assert [change.pairs for change in found.changes] == [20, 20, 19]
    assert found.warnings == ("prompt 'p1' of stories, turn 0, has other tokens in B: left out",)


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("model", {"dtype": "bfloat16"}, "model dtype: 'float32' in A, 'bfloat16' in B"),
        ("model", {"name": "other"}, "model name"),
        ("model", {"parameters": 7}, "model parameters: 3000000 in A, 7 in B"),
        ("settings", {"max_new_tokens": 50}, "settings max_new_tokens: 101 in A, 50 in B"),
        ("settings", {"temperature": 0.7}, "settings temperature: None in A, 0.7 in B"),
        ("methods", {"config": {"budget": 9}}, "method 'adaptive' config"),
        ("methods", {"packed": True}, "method 'adaptive' packed: False in A, True in B"),
    ],
)
def test_runs_of_different_things_are_refused(part, change, named):
    a, b = run(), run()
    if part == "methods":
        b.methods[1] = replace(b.methods[1], **change)
    else:
        setattr(b, part, replace(getattr(b, part), **change))
    with pytest.raises(InputError) as problem:
        compare(a, b)
    assert named in str(problem.value) and "--force" in str(problem.value)
    assert any(named in each for each in compare(a, b, force=True).forced)


def test_other_machines_versions_and_halves_are_warned_of():
    a, b = run(), run()
    b.environment = replace(b.environment, device="another", threads=2, versions={"torch": "2.14.0", "numpy": "3"})
    b.settings, b.complete = replace(b.settings, seeds=[0, 1]), False
    assert compare(a, b).warnings == (
        "environment device: 'a machine' in A, 'another' in B",
        "environment threads: 1 in A, 2 in B",
        "version of numpy: None in A, 3 in B",
        "version of torch: 2.13.0 in A, 2.14.0 in B",
        "settings seeds: [0] in A, [0, 1] in B",
        "B is not complete",
    )


def test_nothing_in_common():
    b = run()
    b.samples = [replace(each, workload="code") for each in b.samples]
    with pytest.raises(InputError, match="no answer in common"):
        compare(run(), b)


@pytest.mark.parametrize("tolerance", [-0.1, 1.0, math.nan])
def test_tolerances_out_of_range(tolerance):
    with pytest.raises(ConfigError, match="tolerance="):
        compare(run(), run(), tolerance=tolerance)


def test_answers_of_one_token_have_no_speed():
    a = run()
    a.samples = [replace(each, new_tokens=1, decode_s=0.0) for each in a.samples]
    found = compare(a, copy.deepcopy(a))
    assert all(change.rate.units == 0 and change.verdict == "no difference seen" for change in found.changes)
