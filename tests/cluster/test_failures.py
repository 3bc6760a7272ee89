"""Processes that die or fail in the middle of a step: the others say so at once, and none waits for ever."""

import os
import signal
import time

import pytest
import torch
from processes import in_processes
from split_toys import saved, split, whole
from test_tensor_parallel import IDS, SMALL, raised
from torch import distributed as dist

import lade
from lade.backends.processes import team

pytestmark = [pytest.mark.distributed, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")]

SECONDS = 30
"""Within which the others hear of it."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return saved("llama", tmp_path_factory.mktemp("models"))


def broken_off(model, rank, happens, heard):
    """What `lade.generate` raises, and after how many seconds, where something happens in the tenth pass of a rank.

    The process of that rank lives on, and keeps its error, until the file `heard` is there.
    """
    passes, own = [], dist.get_rank()

    def tenth(module, *rest):
        passes.append(time.perf_counter())
        if len(passes) == 10 and own == rank:
            happens()

    model.model.layers[1].register_forward_pre_hook(tenth)
    try:
        kept = lade.generate(model, IDS, max_new_tokens=80, lookahead=SMALL)
    except Exception as problem:
        kept = problem
    again, seconds = raised(lambda: lade.generate(model, IDS, max_new_tokens=8)), time.perf_counter() - passes[-1]
    if own != rank:
        heard.touch()
    while not heard.exists() and time.perf_counter() < passes[-1] + 2 * SECONDS:
        time.sleep(0.1)
    return [[type(kept).__name__, str(kept)], seconds, again]


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def fails():
    raise ValueError("out of something")


def made(place, parts):
    return lade.parallel(whole(place)) if parts else split(place, 2)


@pytest.mark.parametrize("parts", [False, True], ids=["split", "parallel"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("happens", [killed, fails])
def test_the_others_hear_of_it(happens, rank, parts, llama, tmp_path):
    heard = tmp_path / "heard"
    if not parts:  # the layers of a split model hold connections of their own, which end with the process
        heard.touch()
    answers = in_processes(2, lambda own: broken_off(made(llama, parts), rank, happens, heard))
    if happens is killed:
        assert answers[rank] is None
    else:
        (kind, words), _, _ = answers[rank]
        assert kind == "ClusterError" and "ValueError: out of something" in words and f"process {rank}" in words
    (kind, words), seconds, again = answers[1 - rank]
    assert kind == "ClusterError" and "restart all of them" in words
    assert seconds < SECONDS
    assert again[0] == "ClusterError" and "no longer connected" in again[1]


def refused(places, versions, parts, rank):
    """What is raised where this process has that model and that version."""
    team.__version__ = versions[rank]
    return raised(lambda: lade.generate(made(places[rank], parts), IDS))


@pytest.mark.parametrize("parts", [False, True], ids=["split", "parallel"])
@pytest.mark.parametrize("what", ["the model's files", "lade's version"])
def test_processes_with_other_models_or_versions_are_refused(what, parts, llama, tmp_path):
    model = whole(llama)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[3, 3] += 1.0  # of which split processes have a part each
    model.save_pretrained(tmp_path)
    places, versions = ([llama, tmp_path], ["1", "1"]) if "files" in what else ([llama, llama], ["1", "2"])
    first, second = in_processes(2, lambda rank: refused(places, versions, parts, rank))
    assert first == second and first[0] == "ClusterError" and what in first[1]
