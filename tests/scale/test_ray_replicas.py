"""Two replicas of a toy on loopback by `examples/ray_serve.py`, as users start them: `make test-scale`."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2 as httpx
import pytest
import torch
from scale_toys import free_port, is_ready, saved

pytest.importorskip("ray", reason="ray is not installed: make test-scale")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"
MESSAGES = [{"role": "user", "content": "hello"}]
SESSIONS = [f"session-{number}" for number in range(8)]
READY_S = 400.0


@pytest.fixture
def replicas(tmp_path):
    folder, model, tokenizer = saved(tmp_path / "toy")
    port = free_port()
    process = subprocess.Popen([sys.executable, str(EXAMPLE), str(folder), "2", str(port)])
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        end = time.monotonic() + READY_S
        while not is_ready(client):
            assert process.poll() is None and time.monotonic() < end, "they do not start"
            time.sleep(0.5)
        yield client, model.float(), tokenizer
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)


def test_both_say_what_generate_says_and_keep_their_sessions(replicas):
    client, model, tokenizer = replicas
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    text = tokenizer.decode(model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0, len(ids) :])

    def places():
        return {
            each: client.get("/v1/lade/status", headers={"x-session-id": each}).json()["replica"] for each in SESSIONS
        }

    end, at = time.monotonic() + READY_S, places()
    while len(set(at.values())) < 2 or at != (at := places()):  # sessions move once, when the second one comes
        assert time.monotonic() < end, "only one of them is used"
        time.sleep(0.5)
    for session in SESSIONS:
        body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20}
        answer = client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
        assert answer.json()["choices"][0]["message"]["content"] == text
    assert places() == at
    name = at[SESSIONS[0]]
    scrape = client.get("/metrics", headers={"x-session-id": SESSIONS[0]}).text
    assert f'replica="{name}"' in scrape and "lade_ready" in scrape
