"""Passes take a known time on a clock that nothing else moves."""

import functools
import json
import signal
import subprocess
import sys

import pytest
import torch

from lade.decoding.drafting.step_cost import KNOTS, StepCost
from lade.tuning import cost_file as store
from lade.tuning import measure


def knee(size):
    return 1e-3 * max(8.0, size / 2)


@pytest.fixture(autouse=True)
def steady(monkeypatch, tmp_path):
    """The number of passes; at that of `interrupt_at` Ctrl-C is pressed."""
    state = {"passes": 0, "now": 0.0, "interrupt_at": None}

    def call(self, size):
        state["passes"] += 1
        if state["passes"] == state["interrupt_at"]:
            signal.raise_signal(signal.SIGINT)
        warm = self.__dict__.setdefault("warm", set())
        seconds = knee(size) * self.cached / 256 * (1 if size in warm else 5)  # the first pass of a size warms up
        warm.add(size)
        state["now"] += seconds
        return seconds

    monkeypatch.setattr(measure.StepTimer, "__call__", call)
    monkeypatch.setattr(measure, "samples_of", functools.partial(measure.samples_of, clock=lambda: state["now"]))
    monkeypatch.setattr(store, "default_folder", lambda: tmp_path / "cache")
    return state


@pytest.fixture
def saved(tmp_path):
    def read():
        return [json.loads(path.read_text()) for path in (tmp_path / "cache").glob("*.json")]

    return read


def test_it_measures_and_saves_the_curve(lade, folder, steady, saved):
    result = lade("tune", "-m", folder, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["model"], found["dtype"], found["interrupted"]) == (str(folder), "float32", False)
    (sweep,) = found["sweeps"]
    assert (sweep["cached"], sweep["free_tokens"]) == (256, 16)
    assert [point["size"] for point in sweep["sizes"]] == list(KNOTS)
    for point in sweep["sizes"]:
        assert point["median_s"] == pytest.approx(knee(point["size"]))
        assert point["quartiles_s"] == pytest.approx([knee(point["size"])] * 2)
        assert point["relative"] == pytest.approx(knee(point["size"]) / 8e-3)
    assert 19.0 < steady["now"] <= 20.0, "all of the time is used"
    (record,) = saved()
    assert StepCost.from_json(record["cost"]).seconds(24) == pytest.approx(knee(24))
    assert record["key"]["dtype"] == "float32" and record["key"]["model"] == "LlamaForCausalLM"
    assert found["profile"] == str(store.path_of(record["key"]))


def test_generation_finds_what_was_saved(lade, folder, model, saved):
    from lade.model.runner import EagerRunner
    from lade.model.supports import supports
    from lade.tuning import cost_cache as profile

    lade("tune", "-m", folder, "--seconds", 3, "--no-pack")
    runner = EagerRunner(model, supports(model).require(), model.generation_config)
    assert profile.step_cost_for(model, runner).seconds(64) == pytest.approx(knee(64))
    assert len(saved()) == 1


def test_the_table_shows_what_is_free(lade, folder):
    result = lade("tune", "-m", folder, "--seconds", 5)
    assert result.exit_code == 0, result.output
    assert "256 cached tokens: 16 tokens for the price of one" in result.stdout
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert lines["16"][1:4] == ["8.00", "8.00-8.00", "1.00"]
    assert lines["24"][1:4] == ["12.00", "12.00-12.00", "1.50"]
    assert lines["128"][3] == "8.00" and len(lines["256"][4]) == 2 * len(lines["128"][4]) == 32
    assert "saved to" in result.stderr and max(map(len, result.stdout.splitlines())) <= 80


def test_several_lengths_share_the_time_and_the_usual_one_is_saved(lade, folder, steady, saved):
    found = json.loads(lade("tune", "-m", folder, "--cached", "64, 128", "--seconds", 10, "--json").stdout)
    assert [sweep["cached"] for sweep in found["sweeps"]] == [64, 128]
    assert found["sweeps"][1]["sizes"][0]["median_s"] == pytest.approx(2 * found["sweeps"][0]["sizes"][0]["median_s"])
    assert steady["now"] <= 10.0
    (record,) = saved()
    assert StepCost.from_json(record["cost"]).seconds(1) == pytest.approx(4e-3)


def test_more_cached_tokens_than_the_model_has_positions_for(lade, folder):
    (sweep,) = json.loads(lade("tune", "-m", folder, "--cached", 100_000, "--seconds", 2, "--json").stdout)["sweeps"]
    assert 500 < sweep["cached"] < 512


@pytest.mark.parametrize(("passes", "complete"), [(3, False), (20, True)])
def test_ctrl_c_keeps_what_it_has(passes, complete, lade, folder, steady, saved):
    steady["interrupt_at"] = passes
    result = lade("tune", "-m", folder, "--json", "--cached", "256,64")
    assert result.exit_code == 130
    found = json.loads(result.stdout)
    assert found["interrupted"] and steady["passes"] == passes
    (sweep,) = found["sweeps"]
    assert len(sweep["sizes"]) == (len(KNOTS) if complete else 3)
    if complete:
        assert sweep["sizes"][0]["median_s"] == pytest.approx(knee(1)), "the first of two passes warms up"
    assert len(saved()) == complete, "half a curve does not replace a whole one"
    assert "interrupted" in result.stderr and ("saved to" if complete else "not saved") in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["cost.svg", "cost.png"])
def test_the_curves_are_drawn(name, lade, folder, tmp_path):
    out = tmp_path / name
    result = lade("tune", "-m", folder, "--cached", "64,256", "--seconds", 3, "--out", out)
    assert result.exit_code == 0, result.output
    assert out.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


def test_without_matplotlib_the_remedy_is_named_before_any_work(lade, folder, steady, monkeypatch, tmp_path):
    monkeypatch.setattr("lade.cli.options.grouping.find_spec", lambda name: None)
    result = lade("tune", "-m", folder, "--out", tmp_path / "cost.svg")
    assert result.exit_code == 2 and "pip install '.[bench]'" in result.stderr
    assert steady["passes"] == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--cached", "0"), ("--cached", "12,,4"), ("--cached", "-5"), ("--cached", "a"), ("--seconds", "0"),
        ("--seconds", "nan"), ("--threads", "0"), ("--out", "cost.txt"), ("--out", "no/such/folder/cost.svg"),
    ],
)  # fmt: skip
def test_wrong_options_are_named_before_any_work(option, value, lade, folder, steady):
    result = lade("tune", "-m", folder, option, value)
    assert result.exit_code == 2, result.output
    assert f"error: {option} " in result.stderr and len(result.stderr.splitlines()) == 1
    assert steady["passes"] == 0


def test_a_model_that_cannot_be_served_is_not_tuned(lade, unsupported):
    result = lade("tune", "-m", unsupported)
    assert result.exit_code == 2 and "GPTNeoForCausalLM" in result.stderr


def test_packed_layers_have_a_curve_of_their_own(lade, saved):
    for option, packed in (("--pack", True), ("--no-pack", False)):
        result = lade("tune", "--device", "cpu", "--seconds", 2, "--json", option)
        assert json.loads(result.stdout)["packed"] is packed
    assert sorted("PackedLinear" in record["key"]["modules"] for record in saved()) == [False, True]


def test_threads(lade, folder, saved):
    before = torch.get_num_threads()
    try:
        lade("tune", "-m", folder, "--threads", 3, "--seconds", 2)
    finally:
        torch.set_num_threads(before)
    assert [record["key"]["threads"] for record in saved()] == [3]


def test_without_a_model_it_is_the_embedded_one(lade):
    assert json.loads(lade("tune", "--seconds", 2, "--json").stdout)["model"] == "embedded"


def test_a_folder_that_cannot_be_written_to_is_told(lade, folder, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(store, "default_folder", lambda: tmp_path / "file" / "folder")
    result = lade("tune", "-m", folder, "--seconds", 2)
    assert result.exit_code == 0 and "not saved" in result.stderr and "cannot be saved" in caplog.text


def test_help_does_not_wait_for_torch():
    code = "import sys, lade.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_has_an_example(lade):
    assert "lade tune --model gpt2" in lade("tune", "--help").stdout
