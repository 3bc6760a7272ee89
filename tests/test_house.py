"""The structure of the code, held to bounds that are only ever tightened: see `scripts/house.py`."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lade
from scripts import house

PACKAGE = Path(lade.__file__).parent
MOST = {
    "files": 209,
    "lines": 43_890,
    "files under 40 lines of code": 9,
    "lines of the largest file": 474,
    "imports, per cent of code": 10.3,  # of 2,900 lines fewer
    "lines of a function, p90": 17,
    "lines of the longest function": 50,
    "files that generate imports": 50,
    "lines that generate imports": 11_913,
    "imports of backends by the core": 0,
    "constants of drafting and tuning": 74,
    "results of backends without a type": 0,
    "files that import the lab": 0,
    "class names used more than once": 1,
    "docstrings that begin with What, Whether or Of": 13,
    "entries of Args that are fragments, per cent": 0.8,
    "lines of tests": 55_496,
    "private attributes in tests": 155,
    "patches in tests": 278,
}
LEAST = {"median lines of a file": 232}  # as all files shrink


@pytest.fixture(scope="module")
def figures():
    return house.House(PACKAGE).figures() | house.figures_of_tests(Path(__file__).parents[1])


@pytest.mark.parametrize("name", [*MOST, *LEAST])
def test_the_house_stays_within_its_bounds(name, figures):
    assert LEAST.get(name, 0) <= figures[name] <= MOST.get(name, math.inf)


def test_every_figure_has_a_bound(figures):
    assert figures.keys() == MOST.keys() | LEAST.keys()


ONE_CALL = """
import inspect
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.embedded import model_path, prompts

PACKAGE = lade.__path__[0]
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).eval()
inputs = AutoTokenizer.from_pretrained(model_path())(prompts()[0], return_tensors="pt", return_token_type_ids=False)
calls, marks, depths = [], [], []
forward = inspect.unwrap(type(model).forward).__code__  # a hook would be foreign code


def profile(frame, event, _):
    if event != "call":
        return
    if frame.f_code.co_filename.startswith(PACKAGE):
        calls.append(frame.f_code.co_filename)
    elif frame.f_code is forward:
        marks.append(len(calls))
        depth = 0
        while frame:
            depth += frame.f_code.co_filename.startswith(PACKAGE)
            frame = frame.f_back
        depths.append(depth)


def call(**config):
    for _ in range(3):
        calls.clear(), marks.clear(), depths.clear()
        sys.setprofile(profile)
        lade.generate(model, **inputs, max_new_tokens=24, do_sample=False, lookahead=lade.LookaheadConfig(**config))
        sys.setprofile(None)


call(mtp=False)
first = calls[: marks[0]]
steps = [calls[begin:end] for begin, end in zip(marks[1:], marks[2:])]
plain, drafted = min(steps, key=len), max(steps, key=len)
changes = sum(a != b for a, b in zip(first, first[1:]))
loaded = {name.split(".")[2] for name in sys.modules if name.startswith("lade.backends.")}
sizes = [each for step in (plain, drafted) for each in (len(set(step)), len(step))]
figures = len(set(first)), changes, len(first), *sizes, depths[1]
call(budget=16, mtp=True)
middle = sorted((calls[begin:end] for begin, end in zip(marks[1:], marks[2:])), key=len)[len(marks) // 2 - 1]
print(len(middle), sum(a != b for a, b in zip(middle, middle[1:])), *figures)
print(*sorted(loaded))
"""


def test_a_greedy_call_stays_near_home():
    """A warm call: files, changes of file and calls before its first pass; files and calls of its steps; frames.

    Before these the calls and changes of file of a step with three passes of an MTP layer, the one in the middle.
    """
    run = subprocess.run(
        [sys.executable, "-c", ONE_CALL],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(PACKAGE.parent)},
    )
    counts, backends = run.stdout.splitlines()
    *counts, frames = map(int, counts.split())
    # Of the steps the one that does least and the one that does most; how many of them draft depends on clocks.
    most = (400, 160, 38, 130, 680, 33, 255, 33, 390)
    assert all(count <= bound for count, bound in zip(counts, most, strict=True)), counts
    assert frames <= 8
    assert not backends  # an unmodified model on a CPU needs no backend; its MTP layer, if it has one, is left out
