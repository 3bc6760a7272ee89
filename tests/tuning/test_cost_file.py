import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from spies import failing, watched

from lade import files
from lade.decoding.drafting.step_cost import StepCost
from lade.tuning.cost_cache import RECORDS

KEY = {"devices": ["a cpu"], "threads": 2, "shape": {"layers": 3, "heads": None}, "torch": "2.13"}
NOW = 1e9


def curve(seconds=1.0, measured_at=NOW):
    return StepCost.of({1: [seconds], 8: [2 * seconds]}, measured_at=measured_at)


@pytest.fixture
def days(monkeypatch):
    """Days that have passed; the last one counts."""
    passed = [0]
    monkeypatch.setattr(files, "time", lambda: NOW + passed[-1] * 24 * 3600)
    return passed


@pytest.fixture(autouse=True)
def folder(own_cache, days):
    return own_cache / "step-cost"


def load(key):
    return RECORDS.load(key, lambda record: StepCost.from_json(record["cost"]))


def save(key, cost):
    return RECORDS.save(key, {"cost": cost.to_json()})


def test_what_was_saved_is_loaded(folder):
    assert load(KEY) is None
    assert save(KEY, curve())
    assert load(KEY).to_json() == curve().to_json()
    reordered = dict(reversed(KEY.items()))
    assert load(reordered) is not None
    path = RECORDS.path_of(KEY)
    assert json.loads(path.read_text())["key"] == KEY, "people can read what it is for"
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize(
    "change", [{"torch": "2.14"}, {"threads": 1}, {"shape": {"layers": 4, "heads": None}}, {"batch": 1}], ids=str
)
def test_another_key_has_another_curve(change):
    save(KEY, curve(1.0))
    other = {**KEY, **change}
    assert load(other) is None
    save(other, curve(3.0))
    assert load(KEY).seconds(1) == 1.0
    assert load(other).seconds(1) == 3.0


def foreign(text):
    return json.dumps({**json.loads(text), "key": {"torch": "1.0"}})


def from_another_time(text):
    record = json.loads(text)
    return json.dumps({**record, "cost": {**record["cost"], "sizes": [1, 2]}})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]", lambda text: "3", lambda text: "{}",
        lambda text: "[" * 100_000, lambda text: b"\xff\xfe\x00", lambda text: text.replace("1.0", "NaN"),
        lambda text: text.replace("1.0", "-1.0"), foreign, from_another_time,
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_reported_and_replaced(damage, caplog):
    save(KEY, curve())
    path = RECORDS.path_of(KEY)
    damaged = damage(path.read_text())
    damaged = damaged if isinstance(damaged, bytes) else damaged.encode()
    path.write_bytes(damaged)
    with caplog.at_level(logging.WARNING, "lade"):
        assert load(KEY) is None
    assert str(path) in caplog.text and "measured again" in caplog.text
    assert path.read_bytes() == damaged, "reading changes nothing"
    assert save(KEY, curve())
    assert load(KEY) is not None


def test_a_folder_in_the_place_of_the_file_and_a_file_in_that_of_the_folder_are_reported(folder, caplog):
    RECORDS.path_of(KEY).mkdir(parents=True)
    assert load(KEY) is None and not save(KEY, curve())
    assert "cannot be used" in caplog.text and "cannot be saved" in caplog.text
    assert len(list(folder.iterdir())) == 1, "no temporary file is left"
    shutil.rmtree(folder)
    folder.write_text("")
    caplog.clear()
    assert not save(KEY, curve()) and load(KEY) is None
    assert "cannot be saved" in caplog.text and "folder" in caplog.text


def test_a_curve_is_measured_again_after_a_month_or_if_its_file_does_not_say_when_it_was_saved(days, caplog):
    save(KEY, curve())
    for later, is_used in ((29, True), (31, False), (-31, False)):  # a clock that was wrong then or is now
        days.append(later)
        assert (load(KEY) is not None) == is_used
    save(KEY, curve())
    path = RECORDS.path_of(KEY)
    path.write_text(path.read_text().replace("saved_at", "noted_at"))
    assert load(KEY) is None and not caplog.records


def test_a_curve_is_replaced_as_a_whole(folder, monkeypatch):
    """Whatever happens while it is written, the old file is there; afterwards the new one, and nothing else."""
    save(KEY, curve(1.0))

    def see(source, target):
        return (load(KEY).seconds(1), json.loads(Path(source).read_text())["key"])

    with monkeypatch.context() as patch:
        seen = watched(patch, os, "replace", see)
        save(KEY, curve(2.0))
    assert seen == [(1.0, KEY)]
    assert load(KEY).seconds(1) == 2.0
    failing(monkeypatch, os, "replace", OSError("no space left on device"))
    assert not save(KEY, curve(3.0))
    assert load(KEY).seconds(1) == 2.0
    assert len(list(folder.iterdir())) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the cache folder does not go by the environment")
def test_processes_that_tests_start_leave_the_users_folder_alone_too(cache_folder):
    code = "from lade.files import Records; print(Records('step-cost', 'step cost').path_of({}).parent)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert Path(found.strip()) == cache_folder
