"""The nginx and the HAProxy of docs/howto/replicas.md before two servers, where they are installed."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import httpx2 as httpx
import pytest
from scale_toys import free_port, is_ready, saved

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "howto" / "replicas.md").read_text(encoding="utf-8")
ASKED = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "ignore_eos": True}
CHAT = "/v1/chat/completions"


@pytest.fixture
def servers(tmp_path):
    folder, _, _ = saved(tmp_path / "toy")
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


def from_page(kind, listens, servers, port):
    """The configuration of the page, with other ports."""
    (text,) = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for old, new in zip(("8001", "8002", f"{listens}8000"), (*servers, f"{listens}{port}"), strict=True):
        assert old in text
        text = text.replace(old, str(new))
    return text


def nginx(folder, servers, port):
    text = from_page("nginx", "listen ", servers, port)
    scratch = "".join(f"{name}_temp_path {folder};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    own = f"pid {folder}/pid; error_log {folder}/errors; daemon off; events {{}} http {{ access_log off; {scratch}\n"
    (folder / "nginx.conf").write_text(f"{own}{text}}}\n")
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def haproxy(folder, servers, port):
    (folder / "haproxy.cfg").write_text(from_page("haproxy", "bind :", servers, port))
    return ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")]


@pytest.fixture(params=[nginx, haproxy])
def balancer(request, servers, tmp_path):
    """A client of one, and whether that tries a full server's request at the next one."""
    name, port = request.param.__name__, free_port()
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} in PATH")
    process = subprocess.Popen(request.param(tmp_path, servers, port))
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as made:
        while not is_ready(made):
            assert process.poll() is None, "it does not start"
            time.sleep(0.1)
        yield made, name == "nginx"
    process.terminate()
    process.wait(30)


def server_of(client, session, header="x-session-id"):
    answer = client.post(CHAT, json={**ASKED, "max_tokens": 2}, headers={header: session})
    return answer.json()["model"] if answer.status_code == 200 else answer.status_code


def flows(client, headers):
    """Whether the pieces of a stream come over a fifth of its time at least; held back they come all at once."""
    times, body = [time.monotonic()], {**ASKED, "max_tokens": 400, "stream": True}
    with client.stream("POST", CHAT, json=body, headers=headers) as response:
        times += [time.monotonic() for _ in response.iter_raw()]
    return len(times) > 10 and times[-1] - times[1] > 0.2 * (times[-1] - times[0])


def server_beside_two_streams(client, session):
    """Which one answers while two streams of this session take its row and its place."""
    body, headers = {**ASKED, "max_tokens": 450, "stream": True, "lookahead": None}, {"x-session-id": session}
    with (
        client.stream("POST", CHAT, json=body, headers=headers),
        client.stream("POST", CHAT, json=body, headers=headers),
    ):
        return server_of(client, session)


def test_sessions_stay_streams_flow_and_the_other_one_takes_over(balancer, servers):
    client, goes_on = balancer
    sessions = [f"s{number}" for number in range(32)]  # by hash: fewer may all fall to one
    at = {session: server_of(client, session) for session in sessions}
    assert set(at.values()) == {f"toy-{port}" for port in servers}, "both are used"
    assert {session: server_of(client, session) for session in sessions} == at
    for header in ("session-id", "x-claude-code-session-id"):
        assert {session: server_of(client, session, header) for session in sessions} == at, "as other clients name it"
    # on a busy machine one try may be delayed
    assert any(flows(client, {"x-session-id": "s0"}) for _ in range(5)), "pieces come as they are written"
    elsewhere = set(at.values()) - {at["s0"]} if goes_on else {503}
    assert any(server_beside_two_streams(client, "s0") in elsewhere for _ in range(5)), "its row and place are taken"
    port = int(at["s0"].removeprefix("toy-"))
    servers[port].kill()
    servers[port].wait()
    assert server_of(client, "s0") in set(at.values()) - {at["s0"]}
