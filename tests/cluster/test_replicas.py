"""Processes that share the prompts of a run."""

import os
import signal
import threading
import time

import pytest
from processes import in_processes
from torch import distributed as dist

from lade.cli.processes import Crew, shared

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
LINES = [3, 5, *range(10, 24)]


class Request:
    """Is done some time after it was made."""

    def __init__(self, seconds):
        self._end = time.monotonic() + seconds

    def done(self):
        return time.monotonic() >= self._end

    def cancel(self):
        pass


def crew(rank):
    store = dist.distributed_c10d._get_default_store()
    return Crew(dist.PrefixStore("crew", store), rank, silence_s=2.5)


def worked(rank, begin, lines=LINES):
    """The answers that the first process gets, in their order; of the others how many each has made."""
    made = []

    def finish(line, request):
        made.append(line)
        return {"line": line, "by": rank}

    def pause():
        time.sleep(0.01)
        return False

    mine = crew(rank)
    with mine.sharing(lines):
        answers = list(shared(mine, lines, begin, finish, 2, pause))
    time.sleep(1.0 if rank == 0 else 0)  # the store is the first one's, perhaps
    return answers if rank == 0 else made


def test_every_prompt_is_answered_once_and_in_order():
    first, second = in_processes(2, lambda rank: worked(rank, lambda line: Request(0.02), LINES if rank == 0 else []))
    assert [answer["line"] for answer in first] == LINES
    assert sorted(answer["line"] for answer in first if answer["by"] == 1) == sorted(second)
    assert 0 < len(second) < len(LINES)


@pytest.mark.distributed
def test_prompts_of_a_process_that_dies_are_taken_by_others():
    def begin(line):
        if dist.get_rank() == 1 and line > 12:
            threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return Request(0.05)

    first, second, third = in_processes(3, lambda rank: worked(rank, begin))
    assert second is None and third
    assert [answer["line"] for answer in first] == LINES


@pytest.mark.distributed
def test_what_the_processes_agree_upon_is_the_first_one_s():
    assert in_processes(2, lambda rank: crew(rank).agreed("seed", 7 + rank)) == [7, 7]
