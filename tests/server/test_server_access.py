"""Keys, hosts, origins; nothing of keys and texts in the log."""

import functools

import pytest
from served import running, until
from spies import watched

from lade.errors import InputError
from lade.server.access_log import AccessLog
from lade.server.keys import NO_KEYS, Keys

SECRET = "sk-very-secret"
ROUTES = [
    ("GET", "/version"), ("GET", "/v1/models"), ("GET", "/v1/models/toy"), ("GET", "/metrics"),
    ("GET", "/v1/lade/status"), ("GET", "/openapi.json"), ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"), ("POST", "/load_model"), ("POST", "/v1/responses"), ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"), ("POST", "/v1/responses/input_tokens"), ("GET", "/v1"),
    ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/no/such/path"), ("GET", "/docs"), ("GET", "/redoc"),
]  # fmt: skip
OPEN = ["/live", "/ready", "/health", "/v1/health"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# of the team\n\nalice:{SECRET}\nsk-another\n")
    with running(keys=Keys.read(file), log=functools.partial(AccessLog, as_json=False)) as server:
        yield server


def test_every_route_wants_a_key(guarded):
    described = guarded.http.get("/openapi.json", headers={"x-api-key": SECRET}).json()["paths"]
    routes = {(method.upper(), path) for path, methods in described.items() for method in methods}
    known = {(method, path.replace("/toy", "/{name}")) for method, path in ROUTES}
    assert routes - known == {("GET", path) for path in OPEN}, "a route that this test does not know"
    for method, path in ROUTES:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": SECRET[:-1]}, {"authorization": SECRET}):
            response = guarded.http.request(method, path, headers=headers, json={} if method == "POST" else None)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert error["type"] == "authentication_error"
            assert path.startswith("/v1/messages") or error["code"] == "invalid_api_key"
    assert all(guarded.http.get(path).status_code == 200 for path in OPEN)


@pytest.mark.parametrize("headers", [{"authorization": f"Bearer {SECRET}"}, {"x-api-key": "sk-another"}])
def test_a_key_opens_them(guarded, headers):
    body = {"messages": [{"role": "user", "content": "my secret text"}], "max_tokens": 3, "temperature": 0}
    response = guarded.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200
    lines = lambda: [line for line in guarded.lines if response.headers["x-request-id"] in line]  # noqa: E731
    until(lines)  # it is written once the answer has gone
    (line,) = lines()
    assert f"key={'alice' if 'authorization' in headers else 'key-2'}" in line
    assert "status=200" in line and "answer=3" in line and "end=length" in line


def test_neither_keys_nor_texts_are_logged(guarded):
    guarded.http.get(f"/v1/models?key={SECRET}", headers={"authorization": f"Bearer {SECRET}"})
    guarded.http.get("/a%0Afake=line", headers={"x-api-key": SECRET})
    log = "\n".join(guarded.lines)
    assert SECRET not in log and "secret text" not in log and "\nfake=line" not in log


@pytest.mark.parametrize("text", ["", "# nothing\n", "two words\n", "gr\u00fc\u00df\n"])
def test_a_file_without_keys_is_refused(tmp_path, text):
    (tmp_path / "keys").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="key"):
        Keys.read(tmp_path / "keys")
    with pytest.raises(InputError, match="cannot be read"):
        Keys.read(tmp_path / "none")


def test_keys_of_the_environment_come_on_top(tmp_path):
    file = tmp_path / "keys"
    file.write_text("alice:one\ntwo\n")
    assert [(key.name, key.secret) for key in Keys.read(file, "bob:three\n four").all] == [
        ("alice", "one"), ("key-2", "two"), ("bob", "three"), ("key-4", "four"),
    ]  # fmt: skip
    assert Keys.read(None) == NO_KEYS and Keys.read(None, "x").find("x").name == "key-1"
    with pytest.raises(InputError, match="LADE_API_KEYS has no keys"):
        Keys.read(file, " ")
    with pytest.raises(InputError, match="LADE_API_KEYS, key 2"):
        Keys.read(None, "x gr\u00fc\u00df")


def test_a_file_that_everybody_can_read_is_warned_of(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text(SECRET)
    for mode, warned in ((0o600, False), (0o640, False), (0o644, True)):
        file.chmod(mode)
        caplog.clear()
        assert SECRET not in repr(Keys.read(file))
        assert [SECRET not in text and "chmod o-r" in text for text in caplog.messages] == [True] * warned


def test_keys_that_have_changed_are_read_again(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text("old")
    read = functools.partial(Keys.read, file)
    with running(keys=read(), read_keys=read) as server:

        def status(secret):
            return server.http.get("/version", headers={"x-api-key": secret}).status_code

        def reread():
            server.service.reload = True
            until(lambda: not server.service.reload)

        file.write_text("new")
        assert (status("old"), status("new")) == (200, 401)
        reread()
        until(lambda: (status("old"), status("new")) == (401, 200))
        file.write_text("two words")
        reread()
        until(lambda: "keeping the previous API keys" in caplog.text)
        assert (status("old"), status("new")) == (401, 200)


def test_who_gets_the_number_of_another_key_gets_nothing_else_of_it(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one\ntwo\nalice:three")
    read = functools.partial(Keys.read, file)
    with running(keys=read(), read_keys=read, prefix_cache=2**24) as server:

        def cached(secret):
            body = {"prompt": "a text that somebody has said before, long enough to be kept", "max_tokens": 1}
            answer = server.http.post("/v1/completions", json=body, headers={"x-api-key": secret}).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("two") == 0 < cached("two") and cached("three") == 0
        file.write_text("four\nfive\nkey-2:six\nalice:seven")  # the second key was two's
        server.service.reload = True
        until(lambda: not server.service.reload)
        until(lambda: server.service.keys.find("five") is not None)
        assert server.service.keys.find("five").name == "key-2"
        assert cached("five") == cached("six") == 0 < cached("seven"), "alice has a new key"


def test_no_answer_is_taken_for_something_else(guarded):
    paths = [("GET", "/version"), ("GET", "/metrics"), ("GET", "/nothing"), ("POST", "/v1/completions"), ("GET", "/")]
    for secret in (SECRET, "wrong"):
        for method, path in paths:
            answer = guarded.http.request(method, path, headers={"x-api-key": secret}, json={"prompt": "a", "n": 0})
            assert answer.headers["x-content-type-options"] == "nosniff", path
    body = {"prompt": "a", "max_tokens": 1, "stream": True}
    streamed = guarded.http.post("/v1/completions", json=body, headers={"x-api-key": SECRET})
    assert streamed.headers["x-content-type-options"] == "nosniff"


def test_only_known_hosts_are_served(server):
    for host, status in {
        "127.0.0.1:1": 200, "localhost": 200, "LOCALHOST:80": 200, "[::1]:8000": 200, "10.1.2.3": 200,
        "evil.example": 403, "localhost.evil.example": 403, "127.0.0.1.evil.example": 403, "": 403, "[": 403,
    }.items():  # fmt: skip
        response = server.http.get("/version", headers={"host": host})
        assert response.status_code == status, host
        if status == 403:
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("permission_error", "forbidden_host")


def test_pages_of_others_may_not_ask(server):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for origin, status in {server.url: 200, "https://evil.example": 403, "null": 403, "http://localhost": 403}.items():
        response = server.http.post("/v1/chat/completions", json=body, headers={"origin": origin})
        assert response.status_code == status, origin
        assert "access-control-allow-origin" not in response.headers
    preflight = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = server.http.options("/v1/chat/completions", headers=preflight)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers


def test_pages_that_are_allowed_may():
    friend = "https://friend.example"
    with running(cors_origins=(friend,), allowed_hosts=("box.lan",)) as server:
        preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        answer = server.http.options("/v1/chat/completions", headers={"origin": friend, **preflight})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == friend
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        answer = server.http.post("/v1/chat/completions", json=body, headers={"origin": friend, "host": "box.lan:1"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == friend
        assert "access-control-allow-credentials" not in answer.headers
        denied = server.http.options("/v1/models", headers={"origin": "https://evil.example", **preflight})
        assert "access-control-allow-origin" not in denied.headers


def test_a_salt_buys_no_turn(guarded, monkeypatch):
    def see(*given, **named):
        return (named["client"], named["scope"])

    asked = watched(monkeypatch, guarded.service.serving.engine, "add", see)
    for secret, salt in ((SECRET, "one"), (SECRET, "two"), ("sk-another", "one")):
        body = {"prompt": "a", "max_tokens": 1, "cache_salt": salt}
        assert guarded.http.post("/v1/completions", json=body, headers={"x-api-key": secret}).status_code == 200
    clients = [client for client, _ in asked]
    assert clients[:2] == ["name:alice"] * 2 and clients[2] != clients[1] and len(set(asked)) == 3
