"""`lade serve` as users start it."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch
from forked import in_fork
from pretend import no_warm_up, not_found
from spies import failing

from lade.cli import serve as checks
from lade.serving.batch import EngineBatch


def free_port():
    """One that no system gives to whoever takes any, and that no other process of tests looks at first."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise AssertionError("no port is free")


def ask(url, body=None, **headers):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response)


def ready(url, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            return ask(f"{url}/ready")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    raise AssertionError("it is never ready")


@pytest.fixture
def served(lade):
    """Run the command in this process; what it is asked is asked by a thread, which then sends SIGTERM."""

    def run(questions, *arguments, env=None):
        port, answers = free_port(), []

        def client():
            try:
                url = f"http://127.0.0.1:{port}"
                ready(url)
                answers.append(questions(url))
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=client)
        thread.start()
        result = lade("serve", "--port", port, "--max-rows", 2, *arguments, env=env)
        thread.join()
        return result, answers[0], port

    return run


def test_it_serves_a_model_until_it_is_told_to_end(served, templated, model, tokenizer):
    def questions(url):
        messages = [{"role": "user", "content": "hi"}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
        return ask(f"{url}/v1/models"), ask(f"{url}/v1/chat/completions", body)

    result, (models, answer), port = served(questions, "--model", templated, "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    assert json.loads(line) == {"url": f"http://127.0.0.1:{port}", "pid": os.getpid(), "model": "chatty"}
    assert [each["id"] for each in models["data"]] == ["chatty"]
    ids = tokenizer("<user>hi|<assistant>")["input_ids"]
    expected = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    assert answer["choices"][0]["token_ids"] == expected
    assert "path=/v1/chat/completions status=200" in result.stderr
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


def test_a_memory_is_kept_in_its_file(served, folder, tmp_path):
    file, template = tmp_path / "texts.memory", tmp_path / "template"
    template.write_text("{{ messages[0].content }}")

    def questions(url):
        body = {"messages": [{"role": "user", "content": "ab"}], "temperature": 0, "max_tokens": 30}
        return ask(f"{url}/v1/chat/completions", body)["usage"]["prompt_tokens"]

    options = ["--model", folder, "--memory", file, "--chat-template", template, "--name", "mine", "--quiet"]
    result, tokens, port = served(questions, *options)
    assert result.exit_code == 0 and tokens == 2 and file.stat().st_size > 0
    assert result.stdout == f"lade serve · mine · http://127.0.0.1:{port} · page / · API /v1\n" and result.stderr == ""
    first = file.read_bytes()
    assert served(questions, *options)[0].exit_code == 0
    assert file.read_bytes() != first, "it goes on with what it has"


def test_a_memory_that_cannot_be_saved_is_an_error(served, folder, tmp_path):
    (there := tmp_path / "there").mkdir()

    def questions(url):
        there.rmdir()
        return ask(f"{url}/v1/completions", {"prompt": "ab", "max_tokens": 3, "ignore_eos": True})["usage"]

    result, usage, _ = served(questions, "--model", folder, "--memory", there / "texts.memory")
    assert (result.exit_code, usage["completion_tokens"]) == (1, 3), result.output
    assert "the draft memory was not saved" in result.stderr and "No such file or directory" in result.stderr


def test_it_says_what_it_is_doing_until_it_is_ready(served, folder):
    """Measuring is done once on a machine, and takes a minute."""
    result, _, port = served(lambda url: ask(f"{url}/version"), "--model", folder, "--log-format", "json")
    said = [json.loads(line) for line in result.stderr.splitlines()]
    told = [line["message"] for line in said if "message" in line]
    assert told[0].startswith(f"listening on http://127.0.0.1:{port}") and told[1].startswith("importing torch")
    loading, ready_at = next(at for at, text in enumerate(told) if "loading" in text), told.index("ready")
    warming = [at for at, text in enumerate(told) if text.startswith("warming up with")]
    assert 1 < loading < warming[0] < ready_at and all(line["time"] and line["level"] for line in said)


def test_keys_come_from_the_environment_too_and_files_of_keys_and_limits_are_read_again(served, folder, tmp_path):
    file, limits = tmp_path / "keys", tmp_path / "limits.toml"
    file.write_text("old")
    file.chmod(0o644)
    limits.write_text("answer-tokens = 3")

    def tokens(url, key):
        """How long an answer is, or with which status it is refused."""
        try:
            asked = {"prompt": "ab", "ignore_eos": True}
            return ask(f"{url}/v1/completions", asked, **{"x-api-key": key})["usage"]["completion_tokens"]
        except urllib.error.HTTPError as problem:
            return problem.code

    def questions(url):
        found = [tokens(url, key) for key in ("of-all", "hers", "old", "new")]
        file.write_text("new")
        limits.write_text("answer-tokens = 5")
        os.kill(os.getpid(), signal.SIGHUP)
        end = time.monotonic() + 60
        while tokens(url, "new") != 5:
            assert time.monotonic() < end
            time.sleep(0.05)
        return found, [tokens(url, key) for key in ("of-all", "hers", "old", "new")]

    before = signal.getsignal(signal.SIGHUP)
    keys, options = {"LADE_API_KEYS": "of-all alice:hers"}, ["--api-key-file", file, "--config", limits]
    result, found, _ = served(questions, "--model", folder, *options, "--answer-tokens", 9, env=keys)
    assert result.exit_code == 0 and found == ([3, 3, 3, 401], [5, 5, 401, 5]), result.output
    assert "can be read by all users" in result.stderr and signal.getsignal(signal.SIGHUP) == before
    assert "reloaded the limits" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "nowhere/texts.memory", "--model", "nowhere"], "'nowhere/texts.memory' cannot be written"),
        (["--memory", "x", "--method", "plain"], "--method plain:"),
        (["--port", "70000"], "--port 70000:"),
        (["--max-rows", "0"], "--max-rows 0:"),
        (["--max-body", "4 apples"], "--max-body '4 apples':"),
        (["--prefix-cache", "much"], "--prefix-cache much:"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout -1.0:"),
        (["--log-format", "xml"], "give one of text, json"),
        (["--per-request-spec-decode-metrics", "all"], "give one of none, summary"),
        (["--share", "some"], "give one of key, all, none"),
        (["--cors-origin", "example.org"], "--cors-origin example.org:"),
        (["--api-key-file", "nowhere"], "key file 'nowhere'"),
        (["--chat-template", "nowhere"], "chat template 'nowhere'"),
        (["--chat-template-kwargs", "{"], "chat-template-kwargs"),
        (["--host", "203.0.113.9"], "cannot listen on 203.0.113.9:8000"),
        (["--method", "magic"], "--method magic:"),
        (["--name", ""], "--name ''"),
        (["--crash-dump", "/dev/null"], "--crash-dump /dev/null:"),
        (["--config", "nowhere"], "config 'nowhere'"),
    ],
)
def test_what_cannot_be_is_one_line(lade, arguments, words):
    result = lade("serve", *arguments)
    assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1


def test_a_model_that_cannot_be_served_is_one_line_with_what_can_be_typed(lade, unsupported, tmp_path):
    asked = tmp_path / "requests.jsonl"
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}
    asked.write_text(json.dumps(request) + "\n")
    for arguments in (["serve", "--port", 0], ["batch", "-i", asked, "-o", tmp_path / "out"]):
        result = lade(*arguments, "--model", unsupported)
        assert result.exit_code == 2 and result.stderr.splitlines()[-1].count("GPTNeoForCausalLM") == 1
        assert "; lade generate decodes it plainly" in result.stderr and "lookahead=" not in result.stderr
    plain = lade("generate", "--model", unsupported, "-n", 2, "x")
    assert plain.exit_code == 0, "and that is true"


@pytest.mark.parametrize(
    ("package", "extra", "arguments"), [("uvicorn", "serve", []), ("opentelemetry", "otel", ["--otel"])]
)
def test_a_missing_package_is_one_line(lade, monkeypatch, package, extra, arguments):
    not_found(monkeypatch, checks, package)
    result = lade("serve", *arguments)
    assert result.exit_code == 2 and f"pip install '.[{extra}]'" in result.stderr and result.stderr.count("\n") == 1


def test_opentelemetry_is_imported_only_where_it_is_asked_for():
    def import_anew():
        for name in [name for name in sys.modules if name.startswith(("lade.server", "opentelemetry"))]:
            del sys.modules[name]
        importlib.import_module("lade.server.listen")
        return [name for name in sys.modules if name.startswith("opentelemetry")]

    assert in_fork(import_anew) == []


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_signals_end_a_process(signals, templated):
    port = free_port()
    command = [sys.executable, "-m", "lade", "serve", "--model", str(templated), "--port", str(port), "--json"]
    with subprocess.Popen([*command, "--max-rows", "1"], stdout=subprocess.PIPE, text=True) as process:
        ready(f"http://127.0.0.1:{port}")
        assert json.loads(process.stdout.readline())["pid"] == process.pid
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "stream": True, "ignore_eos": True}
        data, header = json.dumps(body).encode(), {"content-type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", data, header)
        with urllib.request.urlopen(request, timeout=30) as stream:
            stream.readline()
            process.send_signal(signal.SIGTERM)
            if signals == 2:
                time.sleep(0.1)
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 143
                return
            assert stream.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(60) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_requests_of_a_crash_dump_are_sent_again(lade, folder, tmp_path, monkeypatch):
    request = {"id": "one", "key": "key-1", "path": "/v1/completions", "end": None}
    request |= {"body": {"prompt": "ab", "max_tokens": 3, "ignore_eos": True}}
    dump = tmp_path / "dump.jsonl"
    dump.write_text(json.dumps({"reason": "x"}) + "\n" + json.dumps(request) + "\n")
    (tmp_path / "keys").write_text("a-key")
    options = ["--port", 0, "--model", folder, "--max-rows", 2, "--api-key-file", tmp_path / "keys"]
    result = lade("serve", "--replay", dump, *options)
    line = result.stdout.splitlines()[-1]
    assert result.exit_code == 0 and line.startswith("one /v1/completions status 200 ") and line.endswith("ms 3 tokens")

    no_warm_up(monkeypatch)
    failing(monkeypatch, EngineBatch, "advance", RuntimeError("no device"))
    result = lade("serve", "--replay", dump, *options)
    assert result.exit_code == 1 and "status 500" in result.stdout.splitlines()[-1]
    assert "the engine failed" in result.stderr


def test_a_model_or_a_dump_that_is_not_there_is_one_line(lade, folder, tmp_path):
    wrong = (folder, ["--replay", "nowhere"], "dump 'nowhere': [Errno 2] No such"), (tmp_path, [], tmp_path.name)
    for model, more, words in wrong:
        result = lade("serve", "--port", 0, "--model", model, *more)
        (error,) = [line for line in result.stderr.splitlines() if " info " not in line]
        assert result.exit_code == 2 and error.startswith("error: ") and words in error
