"""Costs by hand, and methods of known acceptance on hardware of round numbers."""

import json
import math
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from lade.errors import ConfigError, InputError
from lade_lab.forecast import SHIPPED, Acceptance, Measured, best_sizes, measured_in, predict
from lade_lab.results import Environment, Method, Model, Results, Sample, Settings, Workload
from lade_lab.roofline import DEVICES, Roofline, cache_bytes_of

# 1 GB read at 1 GB/s is a second; a token's 1e9 operations at 16e9 a second are a sixteenth of it.
ROUND = Roofline(0.5e9, "bf16", 1e9, 16e9, bandwidth_share=1.0, flops_share=1.0)


def acceptance(fed, tokens_per_step, own_s=0.0, family="adaptive", workload="stories"):
    return Acceptance(f"{family} {fed}", workload, family, ((fed, 1),), tokens_per_step, own_s)


def measured(*acceptances, plain_own_s=0.0):
    return Measured(acceptances, plain_own_s, "here", "here")


def test_a_pass_reads_once_and_computes_for_each_token():
    assert (ROUND.memory_s, ROUND.token_s, ROUND.ridge) == pytest.approx((1.0, 1 / 16, 16.0))
    assert [ROUND.seconds(size) for size in (1, 16, 24, 64)] == pytest.approx([1.0, 1.0, 1.5, 4.0])
    assert ROUND.relative(32) == pytest.approx(2.0)
    assert ROUND.free == 19, "1.2 seconds are enough for 19.2 tokens"


def test_what_makes_a_pass_dearer():
    assert replace(ROUND, dtype="float32").memory_s == pytest.approx(2.0)
    assert replace(ROUND, dtype="int4").memory_s == pytest.approx(0.25)
    assert replace(ROUND, bandwidth_share=0.5).memory_s == pytest.approx(2.0)
    assert replace(ROUND, flops_share=0.5).token_s == pytest.approx(1 / 8)
    assert replace(ROUND, cache_bytes=0.5e9).memory_s == pytest.approx(1.5)
    late = replace(ROUND, overhead_s=1.0)
    assert (late.seconds(1), late.seconds(32), late.relative(32)) == pytest.approx((2.0, 3.0, 1.5))
    assert late.free == 22, "2.4 seconds, one of them overhead"


def test_a_pass_that_computes_for_longer_from_the_first_token_on():
    slow = replace(ROUND, flops=0.5e9)
    assert slow.ridge == pytest.approx(0.5) and slow.seconds(1) == pytest.approx(2.0)
    assert slow.relative(3) == pytest.approx(3.0) and slow.free == 1


def test_defaults_are_below_the_peaks():
    roofline = Roofline(7e9, "bfloat16", 3.35e12, 990e12)
    assert roofline.seconds(1) == pytest.approx(14e9 / (0.8 * 3.35e12))
    assert roofline.token_s == pytest.approx(14e9 / (0.6 * 990e12))


def test_keys_and_values_have_16_bits_at_least():
    assert cache_bytes_of("bf16", 1000, 32, 8, 128) == 2 * 1000 * 32 * 8 * 128 * 2
    assert cache_bytes_of("fp32", 1000, 32, 8, 128) == 2 * cache_bytes_of("int4", 1000, 32, 8, 128)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("params", 0.0), ("params", -1.0), ("params", math.nan), ("params", math.inf), ("bandwidth", 0.0),
        ("flops", -1.0), ("cache_bytes", -1.0), ("overhead_s", -1.0), ("overhead_s", math.nan), ("dtype", "int9"),
        ("bandwidth_share", 0.0), ("bandwidth_share", 1.1), ("flops_share", math.nan),
    ],
)  # fmt: skip
def test_values_out_of_range(field, value):
    with pytest.raises(ConfigError, match=f"{field}="):
        replace(ROUND, **{field: value})


def test_devices_read_slower_than_they_compute():
    for device in DEVICES.values():
        assert 100 < device.flops / device.bandwidth < 500 and device.source


def test_speed_is_tokens_per_step_by_cost_of_step():
    (free, dear) = predict(ROUND, measured(acceptance(16, 2.0), acceptance(32, 3.0)))
    assert (free.speedup, free.tokens_per_s, free.step_s) == pytest.approx((2.0, 2.0, 1.0))
    assert (dear.speedup, dear.tokens_per_s, dear.step_s) == pytest.approx((1.5, 1.5, 2.0))
    assert (free.break_even, dear.break_even) == pytest.approx((32.0, 48.0))


def test_steps_of_many_sizes_cost_their_mean_and_not_that_of_the_mean_size():
    mixed = Acceptance("adaptive", "stories", "adaptive", ((8, 3), (64, 1)), 2.0, 0.0)
    (found,) = predict(ROUND, measured(mixed))
    assert found.fed == 22.0 and found.step_s == pytest.approx((3 * 1.0 + 4.0) / 4)


def test_time_outside_the_pass_counts_for_both():
    (found,) = predict(ROUND, measured(acceptance(16, 2.0, own_s=0.5), plain_own_s=0.2))
    assert found.speedup == pytest.approx(2.0 * 1.2 / 1.5)
    assert found.break_even == pytest.approx((2.0 * 1.2 - 0.5) * 16)
    (given,) = predict(ROUND, measured(acceptance(16, 2.0, own_s=0.5), plain_own_s=0.2), own_s=0.0)
    assert given.speedup == pytest.approx(2.4)
    (hopeless,) = predict(ROUND, measured(acceptance(2, 1.1, own_s=0.5)))
    assert hopeless.break_even == 0.0 and hopeless.speedup < 1.0


def test_the_best_size_lies_where_the_line_meets_the_roof():
    """S = 1 + log2(T) / 4: on flat ground more is better; from the ridge on T costs more than log2 T gains."""
    family = [acceptance(fed, 1 + math.log2(fed) / 4) for fed in (4, 64)]
    (best,) = best_sizes(ROUND, measured(*family))
    assert (best.fed, best.tokens_per_step, best.speedup) == pytest.approx((16, 2.0, 2.0))
    assert best.name == "adaptive, best size"


def test_nothing_is_assumed_beyond_the_largest_size():
    (best,) = best_sizes(ROUND, measured(acceptance(4, 1.5), acceptance(9.5, 1.8)))
    assert best.fed == 9 and 1.5 < best.tokens_per_step < 1.8


def test_where_nothing_gains_the_best_is_plain_decoding():
    slow = replace(ROUND, flops=0.5e9)
    (best,) = best_sizes(slow, measured(acceptance(4, 1.5), acceptance(16, 1.9), plain_own_s=0.1))
    assert (best.fed, best.tokens_per_step, best.speedup) == (1.0, 1.0, 1.0)
    assert best.tokens_per_s == pytest.approx(1 / 2.1)


def test_families_and_workloads_are_not_mixed():
    mixed = [acceptance(4, 1.5), acceptance(8, 1.6, workload="code"), acceptance(8, 1.9, family="adaptive-warm")]
    assert best_sizes(ROUND, measured(*mixed)) == []
    two = [
        acceptance(4, 1.5),
        acceptance(8, 1.9),
        acceptance(4, 1.2, workload="code"),
        acceptance(8, 1.3, workload="code"),
    ]
    assert [(each.workload, each.tokens_per_step) for each in best_sizes(ROUND, measured(*two))] == [
        ("stories", 1.9),
        ("code", 1.3),
    ]
    alone = [replace(each, family=None) for each in two]
    assert best_sizes(ROUND, measured(*alone)) == []


def test_what_ships_with_the_package():
    made = {each.name: (each.fed, each.tokens_per_step) for each in SHIPPED.acceptances}
    assert made["adaptive cold, budget 24"] == (23.7, 2.169) and made["adaptive kept, budget 64"] == (64.0, 4.112)
    assert len(made) == 7 and "docs/measurements.md" in SHIPPED.source
    own = {each.fed: each.own_s for each in sorted(SHIPPED.acceptances, key=lambda each: each.fed)}
    assert list(own.values()) == sorted(own.values()) and SHIPPED.plain_own_s == pytest.approx(0.12e-3)
    assert own[9.0] == pytest.approx((0.12 + 0.28 * 8 / 15) * 1e-3), "between 1 token and 16"
    assert own[109.8] == pytest.approx((0.7 + 0.3 * 45.8 / 48) * 1e-3), "on beyond 64"
    assert len(best_sizes(ROUND, SHIPPED)) == 2


def test_what_ships_is_what_the_measurements_say():
    """The table of the adaptive method and the sentence on library time; a figure that changes there changes here."""
    text = (Path(__file__).parents[2] / "docs" / "measurements.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| budget (\d+), (cold|kept) \| \*\*([\d.]+)\*\* \| ([\d.]+) \|", text, re.MULTILINE)
    assert {f"adaptive {memory}, budget {budget}": (float(fed), float(made)) for budget, memory, made, fed in rows} == {
        each.name: (each.fed, each.tokens_per_step) for each in SHIPPED.acceptances
    }
    (found,) = re.findall(r"([\d.]+) ms for a step of one\s+token, \*\*([\d.]+) at 16 tokens, ([\d.]+) at 64\*\*", text)
    written = json.loads((resources.files("lade_lab") / "measured.json").read_text(encoding="utf-8"))
    assert list(written["library_ms"].items()) == list(zip(("1", "16", "64"), map(float, found), strict=True))


def sample(method, workload, step_tokens, accepted, *, own_s=0.0):
    steps = len(step_tokens)
    return Sample(
        workload=workload, prompt="p", turn=0, prompt_sha256="p", prompt_tokens=5, method=method, seed=0, repeat=0,
        new_tokens=1 + sum(accepted), seconds=1.0, prefill_s=0.1, decode_s=0.1 * steps + own_s, forward_s=0.1 * steps,
        steps=steps, step_tokens=step_tokens, accepted=accepted, sources=[], distinct_4grams=1.0, output_sha256="o",
    )  # fmt: skip


def run(*samples):
    kinds = {"hf": "hf", "adaptive 8": "adaptive", "adaptive 16": "adaptive", "hf-assisted": "hf-assisted"}
    return Results(
        "now", [], Environment("a machine", 1, {}, "Linux", None), Model("small", "llama", 1, "float32"), Settings(9),
        [Workload("stories", "jsonl", 1), Workload("code", "jsonl", 1)],
        [Method(name, kind) for name, kind in kinds.items()], "hf", True, list(samples),
    )  # fmt: skip


def test_acceptance_is_read_from_results():
    found = measured_in(
        run(
            sample("hf", "stories", [1] * 10, [1] * 10, own_s=0.2),
            sample("adaptive 8", "stories", [8, 8, 4], [2, 3, 1], own_s=0.6),
            sample("adaptive 8", "stories", [8], [4]),
            sample("adaptive 8", "code", [8], [1]),
            sample("adaptive 16", "stories", [16, 16], [3, 2]),
            sample("hf-assisted", "stories", [6], [5]),
        )
    )
    assert found.plain_own_s == pytest.approx(0.02)
    assert "small, float32, on a machine" in found.source
    assert [name for name, _ in found.left_out] == ["hf-assisted"]
    stories, code, larger = found.acceptances
    assert (stories.name, stories.workload, stories.family) == ("adaptive 8", "stories", "adaptive")
    assert stories.sizes == ((4, 1), (8, 3)) and stories.fed == 7.0
    assert stories.tokens_per_step == 10 / 4 and stories.own_s == pytest.approx(0.6 / 4)
    assert (code.workload, code.tokens_per_step) == ("code", 1.0)
    assert (larger.fed, larger.tokens_per_step) == (16.0, 2.5)
    assert [(each.workload) for each in best_sizes(ROUND, found)] == ["stories"]


def test_on_a_gpu_transformers_own_time_is_not_believed():
    results = run(
        sample("hf", "stories", [1] * 10, [1] * 10, own_s=0.2),
        sample("adaptive 8", "stories", [8, 8], [2, 3], own_s=0.6),
    )
    results.environment = replace(results.environment, versions={"cuda": "13.0"})
    found = measured_in(results)
    assert found.plain_own_s == SHIPPED.plain_own_s and found.acceptances[0].own_s == pytest.approx(0.3)


def test_results_that_say_nothing_about_acceptance():
    with pytest.raises(InputError, match="several tokens a step"):
        measured_in(run(sample("hf", "stories", [1, 1], [1, 1])))
