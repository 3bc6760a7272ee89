"""Figures against values worked out by hand; what is missing stays missing."""

from dataclasses import replace

import pytest
from made_results import METHODS, made_results

from lade_lab.breakdown import acceptance, points_of
from lade_lab.report.prose import closing, findings, verdict
from lade_lab.results import Method, Mismatch, Sample, StepCurve, Workload
from lade_lab.summary import Curve, Spread, curve_of, curves_of, summarise

HF, PLAIN, FAST = Method("hf", "hf"), Method("plain", "plain", packed=True), Method("fast", "adaptive", packed=True)


def sample(method, prompt, seconds, decode_s, steps, fed, accepted, workload="code", **more):
    values = {
        "workload": workload, "prompt": prompt, "turn": 0, "prompt_sha256": "", "prompt_tokens": 10, "method": method,
        "seed": 0, "repeat": 0, "new_tokens": sum(accepted) + 1, "seconds": seconds, "prefill_s": 1.0,
        "decode_s": decode_s, "forward_s": decode_s / 2, "steps": steps, "step_tokens": fed, "accepted": accepted,
        "sources": [], "distinct_4grams": 0.9, "output_sha256": "",
    }  # fmt: skip
    return Sample(**{**values, **more})


def one_token(method, prompt, step_s, tokens=9, **more):
    steps = tokens - 1
    return sample(method, prompt, 1 + steps * step_s, steps * step_s, steps, [1] * steps, [1] * steps, **more)


def small(**changes):
    """Two prompts of 9 tokens: hf at 2 s a step, plain at 1 s; fast in 4 steps of 1.5 s, then in 2 steps of 2 s."""
    samples = [
        one_token("hf", "a", 2.0),
        one_token("plain", "a", 1.0),
        sample("fast", "a", 7.0, 6.0, 4, [4, 4, 4, 4], [2, 2, 2, 2], forward_s=5.0),
        one_token("hf", "b", 2.0),
        one_token("plain", "b", 1.0),
        sample("fast", "b", 5.0, 4.0, 2, [8, 8], [4, 4], forward_s=3.5),
    ]
    curves = [StepCurve(True, 16, [1, 4, 8], [[0.5, 0.5, 9.0], [0.6, 0.6, 0.6], [1.0, 1.0]])]
    found = made_results(prompts=1, methods=[HF, PLAIN, FAST], workloads=("humaneval",))
    values = {"workloads": [Workload("code", "jsonl", 2)], "samples": samples, "mismatches": [], "step_curves": curves}
    return replace(found, **{**values, **changes})


def test_speed_is_paired_by_answer_and_also_summed_and_steps_are_counted_over_all_answers():
    row = summarise(small()).overall.row("fast")
    assert row.speedup.each.median == pytest.approx((17 / 7 + 17 / 5) / 2)
    assert row.speedup.each.count == 2
    assert row.speedup.total == pytest.approx(34 / 12)
    assert row.decode_speedup.total == pytest.approx(16 / 10)  # over plain
    assert row.decode_rate.median == pytest.approx((8 / 6 + 8 / 4) / 2)
    assert row.call_rate.median == pytest.approx((9 / 7 + 9 / 5) / 2)
    assert row.tokens_per_step == pytest.approx(16 / 6)
    assert row.fed_per_step == pytest.approx(32 / 6)
    assert row.step_s == pytest.approx(10 / 6)
    assert row.step_cost == pytest.approx(10 / 6)  # plain takes 1 s a step
    assert row.library_share == pytest.approx(1.5 / 10)
    assert (row.samples, row.new_tokens, row.steps) == (2, 18, 6)
    identity, cost = row.identity, (4 * 0.6 + 2 * 1.0) / 6 / 0.5
    assert (identity.expected, identity.gap) == (pytest.approx(1.6), pytest.approx(0.0))
    assert identity.from_curve == pytest.approx(16 / 6 / cost)


def test_step_cost_is_relative_to_the_base():
    halved = [replace(each, decode_s=4.0) if each.method == "plain" else each for each in small().samples]
    block = summarise(small(samples=halved)).overall
    assert [block.row(name).step_cost for name in ("hf", "plain", "fast")] == pytest.approx([4.0, 1.0, 10 / 3])


def test_where_the_forward_was_not_timed_the_library_has_no_share_and_beyond_the_curve_nothing_is_promised():
    untimed = [replace(each, forward_s=0.0) for each in small().samples]
    short = [StepCurve(True, 16, [1, 4], [[0.5], [0.6]])]
    row = summarise(small(samples=untimed, step_curves=short)).overall.row("fast")
    assert row.library_share is row.identity.from_curve is None


def test_the_identity_shows_steps_that_were_not_counted():
    found = small()
    found.samples[2] = replace(found.samples[2], accepted=[2, 2, 2, 1])
    summary = summarise(found)
    assert summary.overall.row("fast").identity.gap == pytest.approx(-1 / 16)
    assert "6.2% (furthest: fast)" in closing(summary)


def test_the_base_is_plain_or_else_the_reference_if_that_feeds_one_token():
    assert summarise(small()).base == "plain"
    without = [each for each in small().samples if each.method != "plain"]
    assert summarise(small(samples=without)).base == "hf"
    assert summarise(small(samples=without, reference="fast")).base is None
    assert summarise(small(samples=without, reference="fast")).overall.row("fast").step_cost is None


def test_pairs_are_of_the_same_turn_seed_and_repeat():
    other = replace(small().samples[2], repeat=1, seconds=0.1)
    assert summarise(small(samples=[*small().samples, other])).overall.row("fast").speedup.each.count == 2
    twice = [*small().samples, other, replace(small().samples[0], repeat=1, seconds=0.3)]
    speeds = summarise(small(samples=twice)).overall.row("fast").speedup.each
    assert (speeds.count, speeds.low < 17 / 7, speeds.median) == (3, False, pytest.approx(3.0))


def test_a_text_that_ended_sooner_is_not_faster_for_that():
    found = small()
    shorter = replace(found.samples[2], new_tokens=5, seconds=7.0 * 5 / 9)
    row = summarise(small(samples=[found.samples[0], shorter])).overall.row("fast")
    assert row.speedup.each.median == pytest.approx(17 / 7)


def test_workloads_have_blocks_of_their_own_and_one_over_all():
    others = [each for each in small().samples if each.method != "fast"]
    more = [replace(each, workload="text", seconds=2 * each.seconds) for each in others]
    more.append(sample("fast", "a", 68.0, 6.0, 4, [4] * 4, [2] * 4, workload="text"))
    named = [Workload("code", "jsonl", 2), Workload("text", "jsonl", 2)]
    fault = Mismatch("text", "a", 0, "fast", 0, 0, "hf", 3, 5, 6, 1.0, 1.0, 9.0, near_tie=False)
    summary = summarise(small(samples=[*small().samples, *more], workloads=named, mismatches=[fault]))
    assert [block.row("fast").mismatches for block in summary.blocks] == [0, 1, 1]
    assert [block.workload for block in summary.blocks] == ["code", "text", None]
    assert [block.answers for block in summary.blocks] == [2, 2, 4]
    assert summary.blocks[1].row("fast").speedup.each.median == pytest.approx(0.5)
    assert summary.overall.row("fast").speedup.each.count == 3


def test_mismatches_and_near_ties_are_counted_apart():
    one = Mismatch("code", "a", 0, "fast", 0, 0, "hf", 3, 5, 6, 1.0, 1.0, 0.0, near_tie=True)
    found = small(mismatches=[one, replace(one, prompt="b"), replace(one, prompt="b", near_tie=False)])
    row = summarise(found).overall.row("fast")
    assert (row.mismatches, row.near_ties) == (1, 2)
    kinds = [finding.kind for finding in findings(found, summarise(found))]
    assert kinds == ["fault", "gain", "tie"]


def test_findings_are_the_gain_then_losses_then_equal_answers_and_each_says_against_what():
    found = small()
    slow = replace(found.samples[2], seconds=170.0)
    told = findings(found, summarise(small(samples=[*found.samples[:2], slow, *found.samples[3:]])))
    assert [finding.kind for finding in told] == ["gain", "equal"]  # one of two answers is no median
    summary = summarise(small(samples=[*found.samples[:2], slow]))
    told = findings(found, summary)
    assert [finding.kind for finding in told] == ["gain", "loss", "equal"]
    assert "plain" in told[0].text
    assert "fast (0.10 of its speed)" in told[1].text
    found = small(samples=[*small().samples[:1], sample("fast", "a", 27.0, 26.0, 4, [4] * 4, [2] * 4)])
    told = [finding.text for finding in findings(found, summarise(found))]
    assert told[:-1] == ["No method is faster than hf.", "Slower than hf: fast (0.63 of its speed)."]
    found = small(samples=[*small().samples[:2], sample("fast", "a", 13.0, 12.0, 4, [4] * 4, [2] * 4)])
    texts = [each.text for each in findings(found, summarise(found)) if each.kind == "loss"]
    assert texts == ["Slower after prefill than one token a step (plain): fast (0.67 of its speed)."]
    found = small(methods=[HF, PLAIN, replace(FAST, compared=False)])
    told = findings(found, summarise(found))
    assert told[-2].text.startswith("Every answer that was compared equals hf's")
    assert "fast" in told[-1].text


@pytest.mark.parametrize("samples", [[], small().samples[:1], small().samples[2:3]])
def test_missing_samples_are_missing_figures(samples):
    found = small(samples=samples, complete=False)
    summary = summarise(found)
    assert len(summary.overall.rows) == 3
    for row in summary.overall.rows:
        if not row.samples:
            assert row.speedup is row.decode_rate is row.tokens_per_step is row.step_cost is row.identity is None
    assert findings(found, summary)[0].kind == "incomplete"


def test_answers_of_one_token_have_no_steps():
    samples = [one_token(name, "a", 1.0, tokens=1) for name in ("hf", "plain", "fast")]
    row = summarise(small(samples=samples)).overall.row("fast")
    assert row.speedup.total == pytest.approx(1.0)
    assert row.decode_rate is row.tokens_per_step is row.fed_per_step is row.library_share is row.identity is None


def test_quartiles_are_those_of_the_values_and_a_curve_is_straight_between_sizes_and_never_made_up():
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)
    assert Spread.of([]) is None
    curve = Curve.of(StepCurve(False, 16, [1, 3, 9], [[2.0, 2.0], [4.0], []]))
    assert curve.relative(2) == pytest.approx(1.5)
    assert curve.sizes == (1, 3)
    assert Curve.of(StepCurve(False, 16, [2, 4], [[1.0], [1.0]])) is None


def test_the_curve_of_the_run_is_the_one_with_the_most_similar_cache():
    found = made_results(prompts=1)
    kinds = [(packed, cached) for packed in (False, True) for cached in (64, 512)]
    assert [(curve.packed, curve.cached) for curve in curves_of(found)] == kinds
    assert curve_of(found, packed=True).cached == 64
    longer = [replace(each, prompt_tokens=600) for each in found.samples]
    assert curve_of(replace(found, samples=longer), packed=True).cached == 512


def test_a_method_breaks_even_where_its_own_steps_bring_as_much_as_they_take():
    row = summarise(small()).overall.row("fast")
    points = {point.name: point for point in points_of(summarise(small(step_curves=[])))}
    assert set(points) == {"hf, plain", "fast"} and points["hf, plain"].even is None
    assert points["fast"].even == pytest.approx(row.step_cost, abs=0.005) and points["fast"].kind == "gain"
    slow = [replace(each, decode_s=9 * each.decode_s) if each.method == "fast" else each for each in small().samples]
    (lost,) = (point for point in points_of(summarise(small(samples=slow))) if point.name == "fast")
    assert lost.even == pytest.approx(9 * row.step_cost, abs=0.05) and lost.kind == "loss"
    (alone,) = points_of(summarise(small(samples=[each for each in small().samples if each.method == "fast"])))
    assert (alone.even, alone.kind) == (None, "even")


def test_acceptance_is_the_share_of_steps_by_place_and_source_and_adds_up_to_tokens_per_step():
    first = replace(small().samples[2], sources=[{"memory": 3, "bonus": 1}, {"bonus": 4}])
    second = replace(small().samples[5], sources=[{"bonus": 1, "text": 1}, {"memory": 1}, {"odd": 1}])
    places = acceptance(small(samples=[first, second]), "fast")
    assert places == [
        {"text": 1 / 6, "memory": 3 / 6, "bonus": 2 / 6},
        {"memory": 1 / 6, "bonus": 4 / 6},
        {"odd": 1 / 6},
    ]
    assert list(places[0]) == ["text", "memory", "bonus"]
    assert acceptance(small(), "hf") == []
    found = made_results(prompts=3)
    for method in METHODS[2:]:
        shares = [share for place in acceptance(found, method.name) for share in place.values()]
        assert sum(shares) == pytest.approx(summarise(found).overall.row(method.name).tokens_per_step)


def test_the_verdict_says_what_to_use_and_whether_texts_are_equal():
    found = small()
    said = verdict(found, summarise(found))
    assert said.startswith("Use fast: 2.") and said.endswith("all 2 texts equal.")
    tie = Mismatch("code", "a", 0, "fast", 0, 0, "hf", 3, 5, 6, 1.0, 1.0, 0.0, near_tie=True)
    found = small(mismatches=[tie])
    assert "1 of 2 texts equal, the others after a near tie" in verdict(found, summarise(found))
    found = small(mismatches=[replace(tie, near_tie=False)])
    assert not verdict(found, summarise(found)).startswith("Use fast")
    found = small(samples=[*small().samples[:1], sample("fast", "a", 27.0, 26.0, 4, [4] * 4, [2] * 4)])
    assert verdict(found, summarise(found)).startswith("Stay with hf")


def test_answers_of_a_token_or_two_name_no_winner():
    """As of an instruct model that was given its prompts without a chat template."""
    found = small(samples=[replace(each, new_tokens=2) for each in small().samples])
    summary = summarise(found)
    assert verdict(found, summary).startswith("No verdict: answers have 2 tokens on average, and 8 are needed.")
    assert not [each for each in findings(found, summary) if each.kind == "gain"]
