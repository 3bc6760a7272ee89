"""The nginx of docs/howto/replicas.md before two servers, where there is an nginx."""

import json
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from scale_toys import saved

NGINX = shutil.which("nginx")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(NGINX is None, reason="there is no nginx in PATH"),
]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "replicas.md").read_text(encoding="utf-8")
ASKED = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "ignore_eos": True}
CHAT = "/v1/chat/completions"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder, _, _ = saved(tmp_path_factory.mktemp("models") / "toy")
    ports, processes = [free_port(), free_port()], []
    for port in ports:
        command = [sys.executable, "-m", "lade", "serve", "--model", str(folder), "--port", str(port), "--json", "-q"]
        command += ["--name", f"toy-{port}", "--name", "toy", "--max-rows", "1", "--max-waiting", "1"]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
    for process in processes:
        assert json.loads(process.stdout.readline())["url"]
    yield dict(zip(ports, processes, strict=True))
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def client(servers, tmp_path_factory):
    (text,) = re.findall(r"^```nginx\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    folder, port = tmp_path_factory.mktemp("nginx"), free_port()
    for old, new in zip(("8001", "8002", "listen 8000"), (*servers, f"listen {port}"), strict=True):
        assert old in text
        text = text.replace(old, str(new))
    scratch = "".join(f"{name}_temp_path {folder};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    own = f"pid {folder}/pid; error_log {folder}/errors; daemon off; events {{}} http {{ access_log off; {scratch}\n"
    (folder / "nginx.conf").write_text(f"{own}{text}}}\n")
    process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")])
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as made:
        while not answers(made):
            time.sleep(0.1)
        yield made
    process.terminate()
    process.wait(30)


def answers(client):
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def server_of(client, session):
    answer = client.post(CHAT, json={**ASKED, "max_tokens": 2}, headers={"x-session-id": session})
    return answer.json()["model"] if answer.status_code == 200 else answer.status_code


def test_sessions_stay_streams_flow_and_the_other_one_takes_over(client, servers):
    sessions = [f"s{number}" for number in range(8)]
    at = {session: server_of(client, session) for session in sessions}
    assert set(at.values()) == {f"toy-{port}" for port in servers}, "both are used"
    assert {session: server_of(client, session) for session in sessions} == at
    headers, times = {"x-session-id": "s0"}, []
    with client.stream("POST", CHAT, json={**ASKED, "max_tokens": 400, "stream": True}, headers=headers) as response:
        for _ in response.iter_raw():
            times.append(time.monotonic())
    assert len(times) > 10 and times[-1] - times[0] > 0.1, "pieces come as they are written"
    port = int(at["s0"].removeprefix("toy-"))
    body = {**ASKED, "max_tokens": 450, "stream": True, "lookahead": None}
    with (
        client.stream("POST", CHAT, json=body, headers=headers),
        client.stream("POST", CHAT, json=body, headers=headers),
    ):
        assert server_of(client, "s0") in set(at.values()) - {at["s0"]}, "its row and its place are taken"
    servers[port].kill()
    servers[port].wait()
    assert server_of(client, "s0") in set(at.values()) - {at["s0"]}
