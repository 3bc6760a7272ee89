"""The last requests in a file when the engine has failed or hangs: who may read it, what is in it, what is not."""

import errno
import json
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from served import SERVED, Passes, byte_model, running, slow_served, until
from spies import failing

from lade.cli.serve import replay
from lade.errors import InputError
from lade.server import failures
from lade.server.failures import FINISHED, LONGEST_BODY, read_dump
from lade.server.keys import Key, Keys
from lade.server.listen import Server, run
from lade.server.service import Service
from lade.server.settings import Settings, bound

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
SECRET = "sk-one-secret"
KEYS = Keys((Key("alice", SECRET),))


class Device:
    """A model whose passes fail from the moment on that it is gone, or only those with a token in them."""

    def __init__(self, fatal=None):
        self.gone, self.fatal = False, fatal
        self.model = byte_model()
        self.model.register_forward_pre_hook(self._hook, with_kwargs=True)

    def _hook(self, module, given, named):
        self.gone = self.gone or (self.fatal is not None and bool((named["input_ids"] == self.fatal).any()))
        if self.gone:
            raise RuntimeError("no device")

    @property
    def served(self):
        return replace(SERVED, model=self.model)


def dumped(folder):
    (path,) = folder.iterdir()
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def break_server(folder, bodies, path="/v1/completions?x=1", save=None, **settings):
    """Ask, let the device go, ask four times; the server ends."""
    device = Device()
    with running(replace(device.served, save=save), crash_dump=folder, **settings) as server:
        server.http.headers["authorization"] = f"Bearer {SECRET}"
        for body in bodies:
            assert server.http.post(path, json=body).status_code == 200
        device.gone = True
        for number in range(4):
            server.complete("a" * (number + 1), max_tokens=3)
        until(lambda: server.service.phase == "dead")


def test_a_dead_engine_leaves_the_last_requests(tmp_path):
    folder = tmp_path / "made" / "when needed"
    body = {"prompt": "a text", "max_tokens": 3, "ignore_eos": True, "user": "someone"}
    break_server(folder, [body] * (FINISHED + 3), keys=KEYS)
    path, (head, *requests) = dumped(folder)
    assert path.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    assert head["reason"] == "RuntimeError: no device" and "Traceback" in head["details"] and head["model"] == "toy"
    assert {"lade", "torch", "transformers"} <= head.keys()
    assert FINISHED <= len(requests) <= FINISHED + 1, "those in flight, and so many that have ended"
    assert [each["received"] for each in requests] == sorted(each["received"] for each in requests)
    first, last = requests[0], requests[-2]
    assert (first["state"], first["status"], first["error"], first["body"]) == ("done", 200, "", body)
    assert first["path"] == "/v1/completions" and first["method"] == "POST" and first["key"] == "alice"
    assert first["prompt"] == len(SERVED.tokenizer("a text").input_ids) and first["answer"] == 3
    assert last["state"] in ("failed", "running") and last["body"]["prompt"] in ("a", "aa", "aaa", "aaaa")
    assert any(each["error"] == "RuntimeError: no device" for each in requests)
    assert SECRET not in path.read_text() and "authorization" not in path.read_text().lower()


def test_a_pass_that_hangs_leaves_them_once(tmp_path):
    passes = Passes()
    with (
        running(slow_served(wait=passes), pass_timeout=0.2, crash_dump=tmp_path) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        for _ in range(2):
            answer = pool.submit(server.complete, "hangs", max_tokens=9, ignore_eos=True, lookahead=None)
            passes.let(3)
            until(lambda: server.http.get("/live").status_code == 503)
            passes.let(9)
            assert answer.result().status_code == 200
            until(lambda: server.http.get("/live").status_code == 200)
    path, (head, request) = dumped(tmp_path)
    assert path.name.endswith("-stuck.jsonl") and "phase decode" in head["details"]
    assert (request["state"], request["status"], request["body"]["prompt"]) == ("running", 0, "hangs")


def test_a_server_that_breaks_leaves_them(tmp_path, monkeypatch):
    failing(monkeypatch, Server, "run", ZeroDivisionError("division by zero"))
    service, port = Service(Settings(crash_dump=tmp_path), lambda: SERVED), bound("127.0.0.1", 0)
    with port, pytest.raises(ZeroDivisionError):
        run(service, port)
    _, (head,) = dumped(tmp_path)
    assert head["reason"] == "ZeroDivisionError: division by zero" and "Traceback" in head["details"]


def test_without_the_option_no_body_is_kept():
    with running() as server:
        contexts, ended = [], server.service.ended
        server.service.ended = lambda context, path: (contexts.append(context), ended(context, path))
        assert server.complete("private", max_tokens=2).status_code == 200
        until(lambda: contexts)
    assert contexts[0].body == b""


def test_a_long_body_is_its_size(tmp_path):
    body = {"prompt": "a", "max_tokens": 1}
    break_server(tmp_path, [{**body, "user": "x" * LONGEST_BODY}, body])
    _, (_, long, short, *_) = dumped(tmp_path)
    assert long["body"] is None and long["bytes"] > LONGEST_BODY and short["body"] == body


def test_credentials_of_servers_of_tools_are_left_out(tmp_path):
    tools = [
        {"type": "mcp", "server_label": "x", "authorization": "secret", "headers": {"a": "secret"}},
        {"type": "function", "name": "f", "parameters": {"properties": {"headers": {}, "authorization": {}}}},
    ]
    break_server(tmp_path, [{"input": "x", "tools": tools, "max_output_tokens": 1}], path="/v1/responses")
    path, (_, request, *_) = dumped(tmp_path)
    assert request["body"]["tools"] == [{"type": "mcp", "server_label": "x"}, tools[1]]
    assert "secret" not in path.read_text()


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "No space left on device"), MemoryError()])
def test_a_disk_that_is_full_costs_a_line(tmp_path, monkeypatch, caplog, problem):
    failing(monkeypatch, failures, "write_whole", problem)
    saved = []
    break_server(tmp_path, [{"prompt": "ab", "max_tokens": 3}], save=lambda: saved.append(1))
    assert saved, "the server ends as it would have"
    (line,) = [each for each in caplog.messages if "could not be written" in each]
    assert str(tmp_path) in line and "\n" not in line and not list(tmp_path.iterdir())


def written(folder, *requests):
    """A dump with requests by id: body, and whether it had ended."""
    known = {"key": "-", "path": "/v1/completions"}
    lines = [{"id": name, "body": body, "end": end, **known} for name, body, end in requests]
    path = folder / "dump.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [{"reason": "x"}, *lines]))
    return path


def sent_again(path, monkeypatch, **settings):
    """The lines of a replay, once it has ended a server that runs."""
    lines = []
    with running(**settings) as server:
        monkeypatch.setattr(signal, "raise_signal", lambda number: server.server.handle_exit(number, None))
        replay(read_dump(path), server.service, server.url, lambda line: lines.append(line.rstrip()))
        server.thread.join(60)
        assert not server.thread.is_alive()
    return server.service.phase, lines


FATAL = SERVED.tokenizer("~").input_ids[0]


def test_a_replay_fails_again_or_goes_on(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    with running(Device(FATAL).served, crash_dump=tmp_path, keys=KEYS) as server:
        server.http.headers["authorization"] = f"Bearer {SECRET}"
        assert server.complete("fine", max_tokens=5, temperature=0).status_code == 200
        greedy = {"max_tokens": 4, "ignore_eos": True, "temperature": 0}  # a sampled token may be the fatal one
        assert server.events("/v1/completions", prompt="streamed", **greedy)[-1] == "[DONE]"
        for number in range(3):  # of which the engine dies: a fourth may come before or after
            server.complete("~" * (number + 1), max_tokens=3)
        until(lambda: server.service.phase == "dead")
    path, (_, first, *_) = dumped(tmp_path)
    phase, lines = sent_again(path, monkeypatch, served=Device(FATAL).served, keys=KEYS)
    assert phase == "dead" and lines[0].startswith(f"{first['id']} /v1/completions status 200 ")
    assert lines[1].endswith(" ms 4 tokens") and " status 500 " in lines[2]
    phase, lines = sent_again(path, monkeypatch, keys=KEYS)
    assert phase == "draining" and len(lines) == 5 and all(" status 200 " in line for line in lines)


def test_a_replay_sends_together_what_had_not_ended(tmp_path, monkeypatch):
    body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
    requests = [("long", {**body, "max_tokens": 100}, None), ("b", body, "length"), ("c", body, "length")]
    path = written(tmp_path, *requests, ("none", None, None))
    _, lines = sent_again(path, monkeypatch, served=slow_served(0.002))
    names = [line.split()[0] for line in lines]
    assert names.index("b") < names.index("c") < names.index("long"), "those that had ended, one by one"
    assert sorted(names) == ["b", "c", "long", "none"]
    assert lines[names.index("none")] == "none /v1/completions is left out: its body was too long for the dump"


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"reason": "x"}\n{"id": "a"}\n',
        '{"a"',
        '{"a": 1}\n{"id": 1, "key": "", "path": "", "end": "", "body": {}}\n',
    ],
)
def test_what_is_no_dump_is_told(tmp_path, content):
    path = tmp_path / "dump"
    path.write_text(content)
    for wrong in (path, tmp_path / "nowhere"):
        with pytest.raises(InputError, match="give a file that --crash-dump wrote") as raised:
            read_dump(wrong)
        assert str(wrong) in str(raised.value)
