"""Several processes that decode together: forks of the one that tests, so that nothing has to be imported again."""

import json
import os
import signal
import tempfile
import warnings
from pathlib import Path

import torch
from torch import distributed as dist


def in_processes(count, call, seconds=240):
    """What `call(rank)` returns in each of some forked processes that are connected, as JSON has it, by rank.

    Where it raises there is `[name, message]`, and None where the process was killed.

    Args:
        count: how many.
        call: takes the rank.
        seconds: after which it counts as hanging.
    """
    with tempfile.TemporaryDirectory() as folder:
        store, forked = Path(folder) / "store", []
        for rank in range(count):
            read, write = os.pipe()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # what Python thinks of forks beside threads
                child = os.fork()
            if child == 0:
                os.close(read)
                _live(rank, count, store, call, write, seconds)
            os.close(write)
            forked.append((child, read))
        return [_answer(child, read) for child, read in forked]


def _live(rank, count, store, call, pipe, seconds):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(seconds)
    torch.set_num_threads(1)  # those of the process that was forked are not here
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
        answer = call(rank)
    except BaseException as problem:
        answer = [type(problem).__name__, str(problem)]
    os.write(pipe, json.dumps(answer).encode())
    os._exit(0)


def _answer(child, read):
    with open(read) as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert status != signal.SIGALRM, "it hangs"
    return json.loads(answer) if answer else None
