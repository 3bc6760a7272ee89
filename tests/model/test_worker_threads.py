"""Threads that compiled functions share their work among."""

import ctypes
import threading

import pytest
import torch
from forked import in_fork

from lade.backends.cpu import worker_threads
from lade.backends.cpu.invariant.activations import times_logistic
from lade.backends.cpu.worker_threads import run_in_parts, run_on_team


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


@pytest.mark.parametrize(("most", "parts"), [(0, 1), (1, 1), (2, 2), (7, 3)])
def test_each_part_is_run_once(most, parts):
    seen = []
    run_in_parts(lambda *args: seen.append((*args, threading.current_thread() is threading.main_thread())), most)
    assert sorted(seen) == [(part, parts, part == 0) for part in range(parts)]


def test_an_error_in_another_thread_is_raised_here():
    with pytest.raises(ZeroDivisionError):
        run_in_parts(lambda part, parts: 1 // (part - 2), 3)


def test_a_child_has_threads_of_its_own():
    run_in_parts(lambda part, parts: None, 3)

    def parts_in_child():
        seen = []
        run_in_parts(lambda part, parts: seen.append(part), 3)
        return sorted(seen)

    assert in_fork(parts_in_child, seconds=5) == [0, 1, 2]


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
        run_on_team(count, [done.data_ptr()], parts, done)
        assert done.tolist() == [times] * parts


def test_a_child_of_a_process_that_used_its_kernels_can_use_them():
    """OpenMP's pool does not survive a fork: to enter it there would hang, as torch's own operators do."""
    numbers = torch.linspace(-5, 5, 2**17)
    expected = times_logistic(numbers)
    assert in_fork(lambda: bool((times_logistic(numbers).numpy() == expected.numpy()).all()), seconds=10)
