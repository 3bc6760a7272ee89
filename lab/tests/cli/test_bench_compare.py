"""`lade bench compare`, on runs that are made up."""

import json
from dataclasses import replace

import pytest
import typer
from test_cli_errors import fails
from typer.testing import CliRunner

from lade_lab.cli import compare as module
from lade_lab.results import Environment, Method, Model, Results, Sample, Settings, Workload

PROMPTS = 12


def results(**slower):
    def sample(method, prompt):
        seconds = slower.get(method, 1.0) * (1.0 + prompt)
        return Sample(
            workload="stories", prompt=f"p{prompt}", turn=0, prompt_sha256="p", prompt_tokens=5, method=method, seed=0,
            repeat=0, new_tokens=101, seconds=seconds, prefill_s=0.0, decode_s=seconds, forward_s=seconds, steps=50,
            step_tokens=[8] * 50, accepted=[2] * 50, sources=[], distinct_4grams=1.0, output_sha256="o",
        )  # fmt: skip

    names = ("hf", "adaptive")
    return Results(
        "2026-01-01T00:00:00+00:00", ["lade", "bench"], Environment("a machine", 1, {}, "Linux", None),
        Model("small", "llama", 3_000_000, "float32"), Settings(101), [Workload("stories", "jsonl", PROMPTS)],
        [Method(name, name) for name in names], "hf", True,
        [sample(method, prompt) for prompt in range(PROMPTS) for method in names],
    )  # fmt: skip


@pytest.fixture
def compare(tmp_path):
    """Run the command on two runs, or on files."""
    app = typer.Typer()
    app.command("compare", epilog=module.EXAMPLE)(module.compare)

    def run(a, b, *arguments):
        files = []
        for name, each in (("a.json", a), ("b.json", b)):
            if isinstance(each, Results):
                each.save(tmp_path / name)
            files.append(str(tmp_path / name if isinstance(each, Results) else each))
        return CliRunner().invoke(app, [*files, *map(str, arguments)])

    return run


def test_whether_something_got_slower_is_said_and_is_the_exit_code(compare):
    result = compare(results(), results())
    assert result.exit_code == 0, result.output
    assert "nothing got slower by more than 3 % beyond noise" in result.stdout and result.stderr == ""
    result = compare(results(), results(adaptive=1.25))
    assert result.exit_code == 1
    (row,) = [line.split() for line in result.stdout.splitlines() if line.startswith("adaptive")]
    assert row == ["adaptive", "12", "0.800", "0.800-0.800", "0.800", "0.800-0.800", "slower"]
    assert result.stdout.splitlines()[-1] == "slower by more than 3 % beyond noise: adaptive"
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(("tolerance", "code"), [("3%", 1), ("0.03", 1), ("6 %", 0), ("0.06", 0), ("0", 1)])
def test_tolerance(tolerance, code, compare):
    result = compare(results(), results(adaptive=1.05), "--tolerance", tolerance)
    assert result.exit_code == code
    assert ("tolerated" in result.stdout) == (code == 0)


def test_options_reach_the_comparison(compare):
    """What each of them does is seen in `test_compare`; without it the runs do not fail, or are not compared."""
    slower = results(hf=1.25, adaptive=1.25)
    later = results()
    later.samples = [replace(each, seconds=(1 + (each.method == "adaptive")) * each.seconds) for each in later.samples]
    other = results()
    other.model = replace(other.model, dtype="bfloat16")
    other.environment = replace(other.environment, device="another")
    assert "hf, ran at 0.800 times its speed in A" in " ".join(compare(results(), slower).stdout.split())
    assert [compare(results(), slower, *more).exit_code for more in ([], ["--absolute"])] == [0, 1]
    assert [compare(results(), later, *more).exit_code for more in ([], ["--clock", "call"])] == [0, 1]
    fails(compare(results(), other), "model dtype: 'float32' in A, 'bfloat16' in B", "--force")
    forced = compare(results(), other, "--force")
    assert forced.exit_code == 0 and "compared anyway: model dtype" in forced.stderr
    assert "device: 'a machine' in A, 'another' in B" in forced.stderr


def test_what_has_no_noise_is_told_exactly(compare):
    b = results()
    b.samples[1] = replace(b.samples[1], accepted=[1, 1, *[2] * 49], steps=51, step_tokens=[8] * 51, output_sha256="x")
    out = " ".join(compare(results(), b).stdout.split())
    steps = "1200 tokens in 600 steps -> 1200 in 601"
    assert f"adaptive: tokens per step 2.0000 -> 1.9967 ({steps}); 1 of 12 answers" in out
    assert "adaptive: 1 of 12 answers have other tokens" in out


def test_json(compare):
    found = json.loads(compare(results(), results(adaptive=2.0), "--json").stdout)
    assert found["failed"] and found["reference"] == "hf" and found["tolerance"] == 0.03
    change = next(each for each in found["changes"] if each["method"] == "adaptive")
    assert (change["verdict"], change["fails"], change["judged"]) == ("slower", True, "speedup")
    assert change["speedup"]["ratio"] == pytest.approx(0.5) and change["steps_after"]["tokens_per_step"] == 2.0
    few = results()
    few.samples = few.samples[:2]
    text = compare(few, few, "--json").stdout
    assert "Infinity" not in text and json.loads(text)["changes"][1]["rate"]["high"] is None


def test_files_that_are_no_results(compare, tmp_path):
    fails(compare(tmp_path / "none.json", results()), "none.json", "No such file")
    fails(compare(results(), tmp_path), str(tmp_path), "directory")
    bad = tmp_path / "bad.json"
    for text in ("", "{", "[]", '{"schema": "else"}'):
        bad.write_text(text)
        fails(compare(results(), bad), "bad.json", "results")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--tolerance", "x"), ("--tolerance", "100%"), ("--tolerance", "nan"), ("--tolerance", "3%%"), ("--clock", "sun")],
)
def test_wrong_options_are_named(option, value, compare):
    fails(compare(results(), results(), option, value), f"error: {option} {value}")
