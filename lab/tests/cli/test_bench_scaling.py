"""`lade bench scaling`, on a tiny model."""

import json

import pytest
from pretend import not_found, torch_threads
from spies import answered, watched
from test_cli_errors import fails

from lade.backends.cpu.invariant_marker import invariance_of
from lade_lab import scaling_law as scaling_figure
from lade_lab import scaling_run as study
from lade_lab.cli import job
from lade_lab.scaling_law import NAME, Scaling

NEW = 12
TEXTS = ["say it again, say it", "one two three"]


@pytest.fixture
def scaling(lade, folder, prompts, out, monkeypatch):
    """Without pictures, which take their time and have tests of their own."""
    monkeypatch.setattr(scaling_figure, "save_figures", lambda found, folder: [folder / "scaling.svg"])

    def run(*arguments, workload=prompts, out=out):
        arguments = ("-w", workload, "--out", out, "-n", NEW, "--windows", "1,3", "--ngrams", "3,4", *arguments)
        return lade("bench", "scaling", "-m", folder, *arguments)

    return run


def test_the_table_has_sizes_lines_and_the_formula(scaling, out, folder):
    result = scaling()
    assert result.exit_code == 0, result.output
    found = Scaling.load(out / NAME)
    assert found.complete and found.model.name == folder.name and found.settings.max_new_tokens == NEW
    lines = [line.split() for line in result.stdout.splitlines()]
    (row,) = [line for line in lines if line[:1] == ["3"] and line[-1].endswith(")")]
    cells = [f"{point.tokens_per_step:.3f} ({point.fed_per_step:.0f})" for point in (found.of(3)[1], found.of(4)[1])]
    assert " ".join(row) == f"3 {cells[0]} {cells[1]}"
    line, fit = found.line(4), found.expectation()
    assert ["4", f"{line.intercept:.3f}", f"{line.slope:.3f}", f"{line.r_squared:.3f}"] in lines
    assert any(each[:2] == ["all", f"{fit.alpha:.3f}"] and each[3] == f"{fit.rms:.3f}" for each in lines)
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "2 prompts of texts, at most 12 new tokens, 4 sizes" in result.stderr


def test_json(scaling, out):
    found = json.loads(scaling("--json", "--figures").stdout)
    points = {(each["window"], each["ngram"]): each for each in found["points"]}
    assert set(points) == {(1, 3), (3, 3), (1, 4), (3, 4)} and points[3, 4]["guesses"] == 3
    assert points[3, 4]["tokens_per_step"] == Scaling.load(out / NAME).of(4)[1].tokens_per_step
    assert set(found["fits"]["lines"]) == {"3", "4"} and "alpha" in found["fits"]["expectation"]
    assert (found["complete"], found["interrupted"], found["different"], found["mismatches"]) == (True, False, 0, [])
    assert found["figures"] == [str(out / "scaling.svg")] and found["out"] == str(out)


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_resume_goes_on(scaling, out, interrupting):
    interrupting["at"] = 4  # the second prompt of the second size
    result = scaling()
    assert result.exit_code == 130 and "1 sizes are in" in result.stderr and "Traceback" not in result.output
    assert len(Scaling.load(out / NAME).points) == 1
    fails(scaling(), NAME, "--resume")
    interrupting["at"] = 0
    resumed = scaling("--resume")
    assert resumed.exit_code == 0 and "3 sizes; 1 are there already" in resumed.stderr
    assert interrupting["answers"] == 4 + 2 * 3
    again = scaling("--resume", "--json")
    assert again.exit_code == 0 and interrupting["answers"] == 10 and len(json.loads(again.stdout)["points"]) == 4


def test_a_wrong_output_is_exit_code_1(scaling, monkeypatch):
    def spoil(found, arm, *_):
        found.tokens[2] += arm.method.config["window"] == 3

    answered(monkeypatch, study.OwnArm, "complete", spoil)
    result = scaling("--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["different"] == 4
    assert "lookahead 3,3,3: prompt" in result.stderr and "differs from plain decoding at token 2" in result.stderr


def test_figures_are_drawn_only_if_asked_for_and_without_matplotlib_that_is_refused_at_once(scaling, out, monkeypatch):
    not_found(monkeypatch, job)
    fails(scaling("--figures"), "matplotlib is not installed: in the checkout of lade, run pip install '.[bench]'")
    assert not out.exists()
    result = scaling("--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["figures"] == []
    assert [file.name for file in out.iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--windows", "0"), ("--windows", "1,,2"), ("--windows", "a"), ("--ngrams", "1"), ("--ngrams", "-3"),
        ("--max-new-tokens", "1"), ("--threads", "0"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(option, value, scaling):
    result = scaling(option, value)
    assert result.exit_code == 2 and f"error: {option} " in result.stderr and len(result.stderr.splitlines()) == 1


def test_workloads_folders_and_models_that_cannot_be_used_are_refused(
    scaling, tmp_path, out, prompts, lade, unsupported
):
    fails(scaling(workload=tmp_path / "none.jsonl"), "none.jsonl")
    fails(scaling(workload=tmp_path), str(tmp_path))
    (tmp_path / "empty.jsonl").write_text("")
    fails(scaling(workload=tmp_path / "empty.jsonl"), "empty.jsonl")
    fails(scaling(out=prompts), "--out", "is a file")
    fails(scaling(out=prompts / "inside"), "inside")
    assert not out.exists()
    result = lade("bench", "scaling", "-m", unsupported, "-w", prompts, "--out", out, "--windows", 2, "--ngrams", 3)
    assert result.exit_code == 2 and "GPTNeoForCausalLM" in result.stderr and "Traceback" not in result.stderr


def test_a_model_in_16_bits_is_made_invariant(scaling, monkeypatch):
    """Otherwise texts differ at near ties, and those of integer weights are refused."""
    seen = watched(monkeypatch, study.OwnArm, "__init__", lambda arm, method, model, *_: invariance_of(model))
    with torch_threads(2):  # it is for the threads that it is then called with
        result = scaling("--dtype", "bf16", "--threads", "1")
    assert result.exit_code == 0, result.output
    assert seen and None not in seen
