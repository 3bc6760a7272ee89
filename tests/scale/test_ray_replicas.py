"""Two replicas of a toy on loopback, as users start them: `make test-scale`."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import pytest
import torch
from scale_toys import CONTEXT, saved

pytest.importorskip("ray", reason="ray is not installed: make test-scale")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
LADE = [sys.executable, "-m", "lade"]
MESSAGES = [{"role": "user", "content": "hello"}]
SESSIONS = [f"session-{number}" for number in range(8)]
READY_S, BACK_S = 180.0, 30.0


def until(true, seconds):
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it never comes true"
        time.sleep(0.1)
    return found


class Cluster:
    """`lade serve --replicas 2`, and questions to it."""

    def __init__(self, folder, *arguments):
        command = [*LADE, "serve", "--model", folder, "--dtype", "float64", "--port", "0", "--json", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.url = json.loads(self.process.stdout.readline())["url"]
        self.http = httpx.Client(base_url=self.url, timeout=60.0)

    def ask(self, session, **fields):
        body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20, **fields}
        headers = {"x-session-id": session} if session else {}
        return self.http.post("/v1/chat/completions", json=body, headers=headers)

    def replica(self, session):
        """Its name and process; None while nobody answers."""
        try:
            answer = self.http.get("/v1/lade/status", headers={"x-session-id": session})
            return (answer.json()["replica"], answer.json()["pid"]) if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    def stop(self):
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=90)
        return self.process.returncode


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("models") / "toy")


@pytest.fixture(scope="module")
def cluster(toy):
    folder, _, _ = toy
    made = Cluster(str(folder), "--replicas", "2", "--max-rows", "2", "--max-waiting", "2")
    yield made
    made.stop()


def test_both_say_what_generate_says_and_keep_their_sessions(cluster, toy):
    _, model, tokenizer = toy
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    text = tokenizer.decode(model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :])
    at = {session: cluster.replica(session) for session in SESSIONS}
    assert len(set(at.values())) == 2, "both are used"
    for session in SESSIONS:
        assert cluster.ask(session).json()["choices"][0]["message"]["content"] == text
    assert {session: cluster.replica(session) for session in SESSIONS} == at
    scrape = cluster.http.get("/metrics", headers={"x-session-id": SESSIONS[0]}).text
    name = at[SESSIONS[0]][0]
    assert f'lade_ready{{model="toy",replica="{name}"}} 1.0' in scrape


def test_what_is_too_much_is_refused_as_by_one_server(cluster):
    fields = {"max_tokens": CONTEXT, "ignore_eos": True}
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda number: cluster.ask(SESSIONS[0], **fields), range(24)))
    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 503}
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert refused.json()["error"]["code"] == "engine_overloaded" and refused.headers["retry-after"] == "1"


def test_one_is_killed_while_the_other_streams(cluster):
    at = {session: cluster.replica(session) for session in SESSIONS}
    staying, leaving = SESSIONS[0], next(session for session in SESSIONS if at[session] != at[SESSIONS[0]])
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 400, "ignore_eos": True, "stream": True}
    whole = cluster.ask(staying, max_tokens=400, ignore_eos=True).json()["choices"][0]["message"]["content"]
    headers = {"x-session-id": staying}
    with cluster.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        events = [next(lines)]
        os.kill(at[leaving][1], signal.SIGKILL)
        killed = time.monotonic()
        events += list(lines)
    assert [line for line in events if line][-1] == "data: [DONE]"
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in events if line.startswith("data: {")]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole
    until(lambda: cluster.replica(leaving), BACK_S)
    assert cluster.ask(leaving, max_tokens=400, ignore_eos=True).json()["choices"][0]["message"]["content"] == whole
    assert time.monotonic() - killed < BACK_S
    until(lambda: len({cluster.replica(session) for session in SESSIONS} - {None, at[leaving]}) == 2, READY_S)


def test_the_end_lets_answers_end(cluster):
    body = {"messages": MESSAGES, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with cluster.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        threading.Timer(0.0, cluster.process.send_signal, (signal.SIGTERM,)).start()
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert cluster.stop() == 0
