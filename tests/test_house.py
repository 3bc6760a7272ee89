"""The structure of the code, held to bounds that are only ever tightened: see `scripts/house.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lade
from scripts.house import House

PACKAGE = Path(lade.__file__).parent
MOST = {
    "files": 271,
    "lines": 48000,
    "files under 40 lines of code": 19,
    "lines of the largest file": 500,
    "imports, per cent of code": 11.6,
    "lines of a function, p90": 20,
    "lines of the longest function": 56,
    "files that generate imports": 84,
    "lines that generate imports": 15800,
    "imports of backends by the core": 0,
    "files that import the lab": 0,
    "class names used more than once": 1,
    "docstrings that begin with What, Whether or Of": 32,
    "entries of Args that are fragments, per cent": 5,
}
LEAST = {"median lines of a file": 178}


@pytest.fixture(scope="module")
def figures():
    return House(PACKAGE).figures()


@pytest.mark.parametrize("name", MOST)
def test_the_house_stays_below_its_bounds(name, figures):
    assert figures[name] <= MOST[name]


@pytest.mark.parametrize("name", LEAST)
def test_the_house_stays_above_its_bounds(name, figures):
    assert figures[name] >= LEAST[name]


def test_every_figure_has_a_bound(figures):
    assert figures.keys() == MOST.keys() | LEAST.keys()


ONE_CALL = """
import sys

import torch

import lade
from lade.testing import toy_model

PACKAGE = lade.__path__[0]
torch.set_num_threads(1)
model, calls, marks, depths = toy_model().eval(), [], [], []


def profile(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
        calls.append(frame.f_code.co_filename)


def hook(*_):
    marks.append(len(calls))
    frame, depth = sys._getframe(1), 0
    while frame:
        depth += frame.f_code.co_filename.startswith(PACKAGE)
        frame = frame.f_back
    depths.append(depth)


def call():
    ids = torch.arange(5, 25)[None]
    lade.generate(model, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)


call()
model.register_forward_pre_hook(hook)
call()
marks.clear(), depths.clear()
sys.setprofile(profile)
call()
sys.setprofile(None)
first, step = calls[: marks[0]], calls[marks[1] : marks[2]]
changes = sum(a != b for a, b in zip(first, first[1:]))
loaded = {name.split(".")[2] for name in sys.modules if name.startswith("lade.backends.")}
print(len(set(first)), changes, len(first), len(set(step)), len(step), depths[1], *sorted(loaded))
"""


def test_a_greedy_call_stays_near_home():
    """A warm call: files, changes of file and calls before its first pass; files and calls of a step; frames."""
    run = subprocess.run(
        [sys.executable, "-c", ONE_CALL],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)},
    )
    *counts, frames = map(int, run.stdout.split()[:6])
    most = (46, 160, 600, 34, 260)  # a step may draft, or not
    assert all(count <= bound for count, bound in zip(counts, most, strict=True)), counts
    assert frames <= 8
    assert run.stdout.split()[6:] == []  # an unmodified model on a CPU needs no backend
