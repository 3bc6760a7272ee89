"""`lade doctor`; passes take a known time on a clock that nothing else moves."""

import functools
import json

import pytest
import torch
from pretend import torch_threads

from lade import machine
from lade.cli import info
from lade.decoding.drafting.step_cost import KNOTS, StepCost
from lade.files import Records
from lade.model.runner import EagerRunner
from lade.model.supports import supports
from lade.tuning import cost_cache


def knee(size):
    return 1e-3 * max(8.0, size / 2)


@pytest.fixture(autouse=True)
def steady(monkeypatch, tmp_path):
    """The number of passes; at that of `interrupt_at` Ctrl-C is pressed."""
    state = {"passes": 0, "now": 0.0, "interrupt_at": None, "contention": ""}

    def call(self, size):
        state["passes"] += 1
        if state["passes"] == state["interrupt_at"]:
            raise KeyboardInterrupt
        warm = self.__dict__.setdefault("warm", set())
        seconds = knee(size) * self.cached / 256 * (1 if size in warm else 5)  # the first pass of a size warms up
        warm.add(size)
        state["now"] += seconds
        return seconds

    monkeypatch.setattr(cost_cache.StepTimer, "__call__", call)
    monkeypatch.setattr(cost_cache, "samples_of", functools.partial(cost_cache.samples_of, clock=lambda: state["now"]))
    monkeypatch.setattr(cost_cache, "RECORDS", Records("step-cost", "step cost", tmp_path / "cache"))
    monkeypatch.setattr(info, "LONGEST_ANSWER", 24)
    for module in (cost_cache, machine):
        monkeypatch.setattr(module, "contention_now", lambda threads: state["contention"])
    return state


@pytest.fixture
def saved(tmp_path):
    def read():
        return [json.loads(path.read_text()) for path in (tmp_path / "cache").glob("*.json")]

    return read


def test_it_examines_measures_and_tries(report, folder, steady, saved):
    found = report("doctor", "-m", folder, "--seconds", 20)
    assert list(found) == ["machine", "versions", "model", "curve", "trial", "advice"]
    assert found["machine"]["kernels"] == "compiled"
    assert found["versions"]["torch"] == torch.__version__
    assert (found["model"]["model"], found["model"]["dtype"]) == (str(folder), "float32")
    assert found["model"]["threads"] == torch.get_num_threads()
    assert (found["curve"]["cached"], found["curve"]["free_tokens"]) == (256, 16)
    assert [point["size"] for point in found["curve"]["sizes"]] == list(KNOTS)
    for point in found["curve"]["sizes"]:
        assert point["median_s"] == pytest.approx(knee(point["size"]))
    assert 19.0 < steady["now"] <= 20.0, "all of the time is used"
    (record,) = saved()
    assert StepCost.from_json(record["cost"]).seconds(24) == pytest.approx(knee(24))
    assert found["curve"]["saved"] == str(cost_cache.RECORDS.path_of(record["key"]))
    assert found["trial"]["same_tokens"] and found["trial"]["tokens"] <= 3 * 24
    assert found["trial"]["explanation"].startswith("Drafted in ")


def test_generation_finds_what_was_saved(lade, folder, model, saved):
    lade("doctor", folder, "--seconds", 3, "--no-pack")
    runner = EagerRunner(model, supports(model).require(), model.generation_config)
    assert cost_cache.step_cost_for(model, runner).seconds(64) == pytest.approx(knee(64))
    assert len(saved()) == 1


def test_a_busy_machine_is_told_of_and_its_times_are_not_saved(lade, folder, saved, steady):
    steady["contention"] = "The machine is busy."
    result = lade("doctor", "-m", folder, "--seconds", 2)
    assert "- The machine is busy." in result.stdout and "not saved" in result.stderr
    assert not saved()


def test_the_report_fits_80_columns(lade, folder):
    result = lade("doctor", "-m", folder, "--seconds", 5)
    assert result.exit_code == 0, result.output
    assert "passes over 256 cached tokens: 16 tokens for the price of one" in result.stdout
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    assert lines["16"][1:3] == ["8.00", "1.00"] and lines["24"][1:3] == ["12.00", "1.50"]
    assert len(lines["256"][3]) == 2 * len(lines["128"][3]) == 32
    assert "measuring passes" in result.stderr and "saved to" in result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 80 and "what to change" in result.stdout


def test_ctrl_c_ends_it_after_the_parts_that_are_shown(lade, folder, steady, saved):
    steady["interrupt_at"] = 3
    result = lade("doctor", "-m", folder)
    assert result.exit_code == 130 and "interrupted" in result.stderr and "Traceback" not in result.output
    assert "machine" in result.stdout and not saved()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--cached", "0"), ("--seconds", "0"), ("--seconds", "nan"), ("--threads", "0")],
)
def test_wrong_options_are_named_before_any_work(option, value, lade, folder, steady):
    result = lade("doctor", "-m", folder, option, value)
    assert result.exit_code == 2, result.output
    assert f"error: {option} " in result.stderr and len(result.stderr.splitlines()) == 1
    assert steady["passes"] == 0


def test_a_model_that_is_not_supported_is_not_measured(report, unsupported, steady):
    found = report("doctor", "-m", unsupported)
    assert list(found) == ["machine", "versions", "model", "advice"] and not steady["passes"]
    assert found["advice"][0].startswith("The model is decoded plainly: its local attention layers")


def test_a_model_that_cannot_be_loaded_leaves_the_rest_of_the_report(lade, tmp_path):
    result = lade("doctor", "-m", tmp_path / "none")
    assert result.exit_code == 2 and "kernels" in result.stdout and "transformers" in result.stdout


def test_it_says_what_is_packed_and_invariant_and_why_not(report, folder):
    half = report("doctor", "-m", folder, "--dtype", "bfloat16", "--seconds", 2)["model"]
    assert half["invariant"] and not half["not_invariant"]
    found = report("doctor", "--pack", "--seconds", 2)["model"]
    assert (found["packed_layers"], found["products"]) == (1, "1 in float32 by oneDNN")
    assert not found["not_packed"] and "rounding hardly ever shows" in found["not_invariant"]
    plain = report("doctor", "--seconds", 2)["model"]
    assert (plain["packed_layers"], plain["not_packed"]) == (0, "the embedded model is too small")
    assert not plain["captured"] and "CUDA" in plain["not_captured"]
    assert not plain["fused"] and "CUDA" in plain["not_fused"]


def test_threads_and_more_cached_tokens_than_the_model_has_positions_for(report, folder, saved):
    with torch_threads():
        found = report("doctor", "-m", folder, "--threads", 3, "--cached", 100_000, "--seconds", 2)
    assert 500 < found["curve"]["cached"] < 512
    assert [record["key"]["threads"] for record in saved()] == [3]


def test_a_folder_that_cannot_be_written_to_is_told(lade, folder, tmp_path, caplog):
    (tmp_path / "cache").write_text("")
    result = lade("doctor", "-m", folder, "--seconds", 2)
    assert result.exit_code == 0 and "not saved" in result.stderr and "cannot be saved" in caplog.text


WELL = {
    "machine": {"kernels": "compiled", "gpu": None, "cores": 4, "bfloat16_products": "AMX"},
    "versions": {"transformers": "5.24.1", "tested_transformers": "5.24"},
    "model": {
        "device": "cpu", "dtype": "bfloat16", "parameters": 10**9, "supported": True, "packed_layers": 100,
        "threads": 4, "contention": None,
    },
    "curve": {"sizes": [{"size": 1, "median_s": 0.02}, {"size": 8, "median_s": 0.03}]},
    "trial": {"same_tokens": True, "speedup": 1.7},
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "changed", "words"),
    [
        ("machine", {"kernels": "missing"}, "install a C++17 compiler"),
        ("machine", {"kernels": "older than their sources"}, "make native"),
        ("machine", {"gpu": "H100"}, "--device cuda"),
        ("model", {"threads": 1}, "1 of 4 cores"),
        ("versions", {"transformers": "5.99.0"}, "install 5.24"),
        ("model", {"dtype": "float32"}, "--dtype bfloat16"),
        ("model", {"supported": False, "reason": "it is odd"}, "it is odd"),
        ("model", {"device": "cuda:0", "captured": False, "not_captured": "it has hooks"}, "it has hooks"),
        ("model", {"device": "cuda:0", "captured": True, "fused": False, "not_fused": "it is odd"}, "fused into few"),
        ("curve", {"sizes": [{"size": 1, "median_s": 0.02}, {"size": 8, "median_s": 0.08}]}, "4.0 times as long"),
        ("curve", {"sizes": [{"size": 1, "median_s": 1e-3}, {"size": 8, "median_s": 1e-3}]}, "larger models"),
        ("trial", {"same_tokens": False}, "--invariant"),
        ("trial", {"speedup": 0.9}, "lade warm"),
    ],
)
def test_advice(part, changed, words):
    assert info.advice(WELL) == []
    (line,) = info.advice({**WELL, part: {**WELL[part], **changed}})
    assert words in line
