"""The shell under torchrun, as users start it."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "lade"]
ALONE = [sys.executable, "-m", "lade"]
SERVE = ["serve", "--tensor-parallel", "2", "--port", "0", "--json"]
SECONDS = 240
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run(command, *arguments):
    command = [*command, *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=ENVIRONMENT, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def generate(folder, *more):
    return ("generate", "--model", folder, "--max-new-tokens", 30, "--json", *more)


def test_the_model_is_split_and_the_first_process_writes(folder):
    alone, shared = (json.loads(run(way, *generate(folder, "once upon"))) for way in (ALONE, TORCHRUN))
    assert shared["token_ids"] == alone["token_ids"] and len(alone["token_ids"]) == 30


def descendants(pid):
    """Numbers of the processes that this one has started, and of those that they have."""
    children = [int(each) for task in Path(f"/proc/{pid}/task").glob("*/children") for each in task.read_text().split()]
    return children + [each for child in children for each in descendants(child)]


def of_rank(rank, pids):
    """The one of these processes that torchrun has given this rank."""
    return next(pid for pid in pids if f"RANK={rank}" in Path(f"/proc/{pid}/environ").read_text().split("\0"))


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def started(command, tmp_path):
    """A command and the file of what it says to its users; whatever it has started has ended afterwards."""
    said, command = tmp_path / "stderr", [*map(str, command)]
    with said.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=ENVIRONMENT)
    try:
        yield process, said
    finally:
        for pid in (process.pid, *descendants(process.pid)):
            if is_there(pid):
                os.kill(pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


@contextmanager
def completion(url, **body):
    """The answer of a server to a prompt."""
    body = json.dumps({"model": "llama", **body}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        yield answer


def test_a_server_starts_torchrun_and_ends_when_told(folder, tmp_path):
    with started([*ALONE, *SERVE, "--model", folder], tmp_path) as (server, _):
        url = json.loads(server.stdout.readline())["url"]
        with completion(url, prompt="once upon", max_tokens=30, temperature=0) as answer:
            text = json.loads(answer.read())["choices"][0]["text"]
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    alone = json.loads(run(ALONE, *generate(folder, "once upon")))
    assert text == alone["text"]


def killed(process, rank, *, survivor_first=False):
    """Kill a rank, wait for the end of the command: its exit code, and which processes of it are still there.

    With `survivor_first` torchrun, which ends the other rank as soon as it sees the loss, sees it only after that one
    has ended by itself.
    """
    pids = descendants(process.pid)
    lost, other = (of_rank(each, pids) for each in (rank, 1 - rank))
    if survivor_first:
        os.kill(process.pid, signal.SIGSTOP)
    os.kill(lost, signal.SIGKILL)
    if survivor_first:
        deadline = time.monotonic() + 30
        while is_there(other) and time.monotonic() < deadline:
            time.sleep(0.05)
        ended = not is_there(other)
        os.kill(process.pid, signal.SIGCONT)
        assert ended, "the other process goes on without the one that was killed"
    start = time.monotonic()
    code = process.wait(timeout=30)
    time.sleep(max(0.0, 1.0 - (time.monotonic() - start)))
    return code, [pid for pid in pids if is_there(pid)]


LOST = ("another process of this job has exited", "a pass of 2 processes failed")
"""What the process that is left says, between two passes or within one: `restart all of them` follows."""


@pytest.mark.slow
@pytest.mark.parametrize("survivor_first", [True, False], ids=["survivor-first", "either-first"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_the_run_with_an_error(rank, survivor_first, folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"text {number}"}) + "\n" for number in range(3000)))
    with started([*TORCHRUN, *generate(folder, "--prompts", prompts)], tmp_path) as (process, said):
        assert json.loads(process.stdout.readline())["token_ids"]
        code, left = killed(process, rank, survivor_first=survivor_first)
        assert code != 0 and not left, said.read_text()[-3000:]
        text = said.read_text()
        assert any(words in text for words in LOST) or not survivor_first, text[-3000:]
        assert f"local_rank: {rank}" in text and "SIGKILL" in text, text[-3000:]
        assert "Traceback" not in text.partition("torch/distributed/elastic")[0]


@pytest.mark.slow
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_that_loses_a_process_ends_with_an_error(rank, busy, folder, tmp_path):
    with started([*ALONE, *SERVE, "--model", folder], tmp_path) as (process, said), ExitStack() as open_requests:
        url = json.loads(process.stdout.readline())["url"]
        if busy:
            streaming = completion(url, prompt="once", max_tokens=450, stream=True)
            open_requests.enter_context(streaming).readline()
        code, left = killed(process, rank)
        assert code != 0 and not left, said.read_text()[-3000:]
        text = said.read_text()
        assert any(words in text for words in LOST) and f"local_rank: {rank}" in text and "SIGKILL" in text
        assert "Exception in thread" not in text and "Application shutdown failed" not in text
