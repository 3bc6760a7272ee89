"""Threads that compiled functions share their work among."""

import ctypes
import itertools
import threading

import pytest
import torch
from forked import in_fork

from lade.backends.cpu import worker_threads
from lade.backends.cpu.invariant.activations import times_logistic
from lade.backends.cpu.kernels import kernel
from lade.backends.cpu.worker_threads import At, Room, Stages, run_on_team


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


LOCK = threading.Lock()


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def count(address):
    """Count each part up, in the numbers that the only field points to."""
    fields = ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))
    done = ctypes.cast(fields[2], ctypes.POINTER(ctypes.c_int64))
    while True:
        with LOCK:
            part = fields[0]
            fields[0] += 1
        if part >= fields[1]:
            return
        with LOCK:
            done[part] += 1


count.address = ctypes.cast(count, ctypes.c_void_p).value


@pytest.mark.parametrize("parts", [1, 2, 3, 50])
@pytest.mark.parametrize("openmp", [True, False])
def test_a_team_does_each_part_once(monkeypatch, parts, openmp):
    if not openmp:
        monkeypatch.setattr(worker_threads, "_entrance", lambda: None)
    elif worker_threads._entrance() is None:
        pytest.skip("torch has no pool of OpenMP's that this knows to enter")
    done = torch.zeros(parts, dtype=torch.int64)
    for times in (1, 2, 3):
        run_on_team(count, [done.data_ptr()], parts)
        assert done.tolist() == [times] * parts


def test_a_child_of_a_process_that_used_its_kernels_can_use_them():
    """OpenMP's pool does not survive a fork: to enter it there would hang, as torch's own operators do."""
    numbers = torch.linspace(-5, 5, 2**17)
    expected = times_logistic(numbers)
    assert in_fork(lambda: bool((times_logistic(numbers).numpy() == expected.numpy()).all()), seconds=10)


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("openmp", [True, False])
def test_stages_come_one_after_the_other(monkeypatch, times, openmp):
    """Each adds what the one before it has written, all parts of it."""
    if not openmp:
        monkeypatch.setattr(worker_threads, "_entrance", lambda: None)
    numbers, stages, room = torch.arange(10_000.0), Stages(), Room(2)
    between = [room.take(numbers.nbytes) for _ in range(times)]
    places = [At(0), *between, At(1)]
    for a, found in itertools.pairwise(places):
        stages.add(kernel("add"), 7, (a, At(0), found, 0, len(numbers)))
    for _ in range(3):
        found, memory = torch.empty_like(numbers), torch.empty(room.size, dtype=torch.int8)
        stages.run((numbers.data_ptr(), found.data_ptr(), memory.data_ptr()))
        assert torch.equal(found, numbers * (times + 2))


def test_memory_of_a_call_is_handed_out_piece_by_piece():
    room = Room(5)
    assert [room.take(size) for size in (64, 1, 65)] == [At(5, 0), At(5, 64), At(5, 128)] and room.size == 256
