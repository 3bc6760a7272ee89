"""Threads that compiled functions share their work among."""

import ctypes
import itertools
import threading
import time
from array import array

import pytest
import torch
from forked import in_fork
from pretend import use_threads

from lade.backends.cpu import kernels as worker_threads
from lade.backends.cpu.invariant.functions import times_logistic
from lade.backends.cpu.kernels import At, Stages, ThreadTeam, kernel, run_on_team


@pytest.fixture(autouse=True)
def three_threads(monkeypatch):
    use_threads(monkeypatch, 3)


LOCK = threading.Lock()


def parts_taken(fields):
    """The parts that this thread takes, as kernels do, until none is left."""
    while True:
        with LOCK:
            part = fields[0]
            fields[0] += 1
        if part >= fields[1]:
            return
        yield part


def fields_at(address):
    return ctypes.cast(address, ctypes.POINTER(ctypes.c_int64))


def run_by_two(work):
    threads = [threading.Thread(target=kernel("run_stages"), args=(work.buffer_info()[0],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def count(address):
    """Count each part up, in the numbers that the only field points to."""
    fields = fields_at(address)
    done = fields_at(fields[2])
    for part in parts_taken(fields):
        with LOCK:
            done[part] += 1


count.address = ctypes.cast(count, ctypes.c_void_p).value


@pytest.fixture(params=[True, False], ids=["OpenMP", "own threads"])
def team(request, monkeypatch):
    """Work is shared among the threads of OpenMP's pool, or of one of our own."""
    if not request.param:
        monkeypatch.setattr(worker_threads, "_entrance", lambda: None)
    elif worker_threads._entrance() is None:
        pytest.skip("torch has no pool of OpenMP's that this knows to enter")


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("parts", [1, 2, 3, 50])
def test_a_team_does_each_part_once(parts):
    done = torch.zeros(parts, dtype=torch.int64)
    for times in (1, 2, 3):
        run_on_team(count, [done.data_ptr()], parts)
        assert done.tolist() == [times] * parts


def test_a_child_of_a_process_that_used_its_kernels_can_use_them():
    """OpenMP's pool does not survive a fork: to enter it there would hang, as torch's own operators do."""
    numbers = torch.linspace(-5, 5, 2**17)
    expected = times_logistic(numbers)
    assert in_fork(lambda: bool((times_logistic(numbers).numpy() == expected.numpy()).all()), seconds=10)


@pytest.mark.usefixtures("team")
@pytest.mark.parametrize("times", [1, 2, 5])
def test_stages_come_one_after_the_other(times):
    """Each adds what the one before it has written, all parts of it."""
    numbers, stages = torch.arange(10_000.0), Stages()
    between = [stages.take(numbers.nbytes) for _ in range(times)]
    places = [At(1), *between, At(2)]
    for a, found in itertools.pairwise(places):
        stages.add(kernel("add"), 7, (a, At(1), found, 0, len(numbers)))
    for _ in range(3):
        found, memory = torch.empty_like(numbers), torch.empty(stages.size, dtype=torch.int8)
        stages.run((memory.data_ptr(), numbers.data_ptr(), found.data_ptr()))
        assert torch.equal(found, numbers * (times + 2))


@pytest.mark.parametrize("parts", list(itertools.product([1, 4], repeat=4)))
def test_kernels_that_are_joined_wait_for_each_other_behind_the_last(parts):
    """Halves of what the first kernel finds are added up by joined kernels, and what comes then needs both."""
    numbers, half, stages = torch.arange(10_000.0), 20_000, Stages()
    once, doubled, zeros = (stages.take(numbers.nbytes) for _ in range(3))
    stages.add(kernel("add"), parts[0], (At(1), zeros, once, 0, len(numbers)))
    for number, start in enumerate((0, half)):
        place, x = (each._replace(offset=each.offset + start) for each in (doubled, once))
        stages.add(kernel("add"), parts[1 + number], (x, x, place, 0, len(numbers) // 2), joined=number > 0)
    stages.add(kernel("add"), parts[3], (doubled, doubled, At(2), 0, len(numbers)))
    for _ in range(200):
        found, memory = torch.empty_like(numbers), torch.full((stages.size,), 7, dtype=torch.int8)
        memory[zeros.offset :] = 0
        stages.run((memory.data_ptr(), numbers.data_ptr(), found.data_ptr()))
        assert torch.equal(found, 4 * numbers)


def test_kernels_of_one_part_are_run_by_one_thread_and_others_by_all():
    numbers, stages = torch.arange(1000.0), Stages()
    a, b, c, d = (stages.take(numbers.nbytes) for _ in range(4))
    for parts, x, found in ((1, At(1), a), (1, a, b), (5, b, c), (1, c, d), (1, d, At(2))):
        stages.add(kernel("add"), parts, (x, x, found, 0, len(numbers)))
    fields, _ = stages.described
    assert fields[2] == 4  # addresses, a sequence of two, one, a sequence of two
    for _ in range(50):
        found, memory = torch.empty_like(numbers), torch.empty(stages.size, dtype=torch.int8)
        stages.run((memory.data_ptr(), numbers.data_ptr(), found.data_ptr()))
        assert torch.equal(found, 32 * numbers)


def test_memory_of_a_call_is_handed_out_piece_by_piece():
    stages = Stages()
    assert [stages.take(size) for size in (64, 1, 65)] == [At(0, 0), At(0, 64), At(0, 128)] and stages.size == 256


class Machine:
    """A clock, and a team whose threads keep it waiting for `stall_ms` in each call."""

    def __init__(self, monkeypatch):
        self.now, self.stall_ms, self.entered, self.alone_ns, self.team = 10**12, 0.0, 0, 0, ThreadTeam()
        monkeypatch.setattr(worker_threads, "monotonic_ns", lambda: self.now)
        monkeypatch.setattr(worker_threads, "kernel", lambda name: getattr(self, name))

    def run_team(self, place):
        """Run as OpenMP's pool would: the first thread leaves at once, the last one after the stall."""
        call = fields_at(place)
        work = fields_at(call[1])
        self.entered += 1
        work[1], work[4] = 1, self.now
        self.now += int(1e6 * self.stall_ms)
        call[3] = self.now

    def run_stages(self, place):
        fields_at(place)[1] = 1

    def calls(self, count, each_ms=0.1):
        """Return how many of so many calls were shared."""
        before = self.entered
        for _ in range(count):
            self.team.run(array("q", (0, 0, 0, 0, 0)), 2)
            self.now += int(1e6 * each_ms)
        return self.entered - before


def test_teams_that_never_stall_share_all_calls(monkeypatch):
    machine = Machine(monkeypatch)
    machine.stall_ms = 0.2
    assert machine.calls(1000) == 1000


def test_a_team_that_stalls_works_alone_for_a_while(monkeypatch):
    machine = Machine(monkeypatch)
    machine.stall_ms = 5.0
    assert machine.calls(1) == 1
    machine.stall_ms = 0.0
    assert machine.calls(390) == 0 and machine.calls(20) > 5  # 40 ms later


def test_stalls_take_little_of_the_time_on_a_busy_machine(monkeypatch):
    """And a machine that is free is noticed within a second."""
    machine = Machine(monkeypatch)
    machine.stall_ms, began = 8.0, machine.now
    shared = machine.calls(30_000)
    assert shared >= 3 and 8e6 * shared < 0.06 * (machine.now - began)
    machine.stall_ms = 0.0
    machine.calls(10_000)
    assert machine.calls(100) == 100


def test_a_hiccup_now_and_then_costs_what_it_costs_alone(monkeypatch):
    """After a busy second, too: the time alone is not what it was then."""
    machine = Machine(monkeypatch)
    machine.stall_ms = 8.0
    machine.calls(10_000)
    shared = 0
    for _ in range(10):
        machine.stall_ms = 1.0
        machine.calls(1, each_ms=1000.0)  # the first of them ends the time alone
        machine.stall_ms = 0.0
        shared += machine.calls(1000)
    assert shared >= 9 * 900


def test_what_is_done_while_a_thread_is_missing_is_no_stall(monkeypatch):
    """Threads leave, a lone one goes on until the team may come together again, and that finishes the call."""
    machine, calls = Machine(monkeypatch), []

    def run_team(place):
        work = fields_at(fields_at(place)[1])
        calls.append("team")
        if len(calls) == 1:
            work[0], work[3] = 400_000, 1  # one of two waited for the other
        work[1] = len(calls) > 1
        work[4] = fields_at(place)[3] = machine.now

    def run_stages(place):
        calls.append("alone")
        machine.now = fields_at(place)[3]

    machine.run_team, machine.run_stages = run_team, run_stages
    machine.team.run(array("q", (0, 0, 0, 0, 0)), 2)
    assert calls == ["team", "alone", "team"] and machine.now == 10**12 + ThreadTeam.ALONE * 400_000


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def slow_first_part(address):
    """Take the parts, and sleep in the first one."""
    for part in parts_taken(fields_at(address)):
        time.sleep(0.0 if part else 0.1)


def test_stages_tell_how_long_threads_have_waited_and_when_the_first_one_left():
    address = ctypes.cast(slow_first_part, ctypes.c_void_p).value
    work = array("q", (0, 0, 2, 0, 0, *(0, address, 2, 0, 0, 2), *(0, address, 2, 0, 1, 1)))
    began = time.monotonic_ns()
    run_by_two(work)
    assert 5e7 < work[0] < time.monotonic_ns() - began and work[3] == 1
    work[3] = 0
    run_by_two(work)  # if the late thread has not done all
    assert work[1] and began < work[4] < time.monotonic_ns()


TAKERS: list[int] = []


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def noted(address):
    """Take part by part, and note which thread does."""
    for _ in parts_taken(fields_at(address)):
        TAKERS.append(threading.get_ident())
        time.sleep(0.001)


@pytest.mark.parametrize("stop", ["a stall", "a clock"])
def test_threads_stop_behind_a_kernel_and_go_on_when_they_are_called_again(stop):
    """Each part is done once; behind a thread that was waited for nobody begins another kernel."""
    stalls = stop == "a stall"
    addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in (slow_first_part if stalls else noted, noted)]
    until = 0 if stalls else time.monotonic_ns() + 5_000_000
    work = array("q", (0, 0, 3, until, 0, *(0, addresses[0], 2, 0, 0, 2), *(0, addresses[1], 2, 0, 0, 9) * 2))
    TAKERS.clear()
    run_by_two(work)
    assert len(TAKERS) <= (9 if stalls else 11) and not work[1], "a late thread may have begun the second kernel"
    work[3] = 0
    run_by_two(work)
    assert len(TAKERS) == 18 + 2 * (not stalls) and work[1]
