"""Limits of keys: requests and tokens per minute, choices at a time; what each has used is counted by its name."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from served import Passes, running, slow_served, until, until_placed

from lade.errors import InputError
from lade.server.errors import ApiError
from lade.server.keys import NO_LIMITS, Key, KeyLimits, Keys
from lade.server.tenants import Quotas

KEYS = Keys(
    (Key("alice", "sk-a", limits=KeyLimits(rows=2)), Key("bob", "sk-b", limits=KeyLimits(2, 40)), Key("c", "sk-c"))
)


def ask(server, secret, **fields):
    body = {"prompt": "ab", "max_tokens": 3, "ignore_eos": True, **fields}
    return server.http.post("/v1/completions", json=body, headers={"x-api-key": secret})


def refused(response):
    assert response.status_code == 429 and response.json()["error"]["code"] == "rate_limit_exceeded", response.text
    assert response.json()["error"]["type"] == "rate_limit_error"
    return int(response.headers["retry-after"])


def test_requests_of_a_key_are_limited_and_no_others():
    with running(keys=KEYS) as server:
        assert [ask(server, "sk-b").status_code for _ in range(2)] == [200, 200]
        assert 1 <= refused(ask(server, "sk-b")) <= 30, "one comes back in half a minute"
        anthropics = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        answer = server.http.post("/v1/messages", json=anthropics, headers={"x-api-key": "sk-b"})
        assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
        assert {ask(server, secret).status_code for secret in ("sk-a", "sk-c")} == {200}
        until(server.at_rest)
        metrics = server.http.get("/metrics", headers={"x-api-key": "sk-c"}).text
    assert 'lade_key_requests_total{key="bob",model="toy",outcome="length"} 2.0' in metrics
    assert 'lade_key_requests_total{key="bob",model="toy",outcome="rejected"} 2.0' in metrics
    assert 'lade_key_tokens_total{key="bob",kind="generation",model="toy"} 6.0' in metrics
    assert 'lade_key_tokens_total{key="alice",kind="prompt",model="toy"}' in metrics and "sk-" not in metrics


def test_tokens_of_a_key_are_limited():
    with running(keys=KEYS) as server:
        assert ask(server, "sk-b", max_tokens=60).status_code == 200, "it may exceed them once"
        until(server.at_rest)
        assert 25 <= refused(ask(server, "sk-b")) <= 60
        assert ask(server, "sk-c").status_code == 200


def test_choices_of_a_key_at_a_time_are_limited():
    passes = Passes()
    with running(slow_served(wait=passes), keys=KEYS) as server, ThreadPoolExecutor(2) as pool:
        two = pool.submit(ask, server, "sk-a", n=2)
        until_placed(server, passes, rows=2, waiting=0)
        assert refused(ask(server, "sk-a")) == 1
        other = pool.submit(ask, server, "sk-c")
        passes.let_all()
        assert two.result().status_code == other.result().status_code == 200
        until(server.at_rest)
        assert ask(server, "sk-a").status_code == 200
        assert ask(server, "sk-a", n=3).json()["error"]["code"] == "too_large_for_server"


def test_allowances_come_back_evenly():
    now = [0.0]
    quotas, limits = Quotas(lambda: now[0]), KeyLimits(6, 60)

    def wait():
        try:
            quotas.take("a", limits, 1, 0)
        except ApiError as problem:
            return int(problem.headers["Retry-After"])
        return 0

    assert [wait() for _ in range(7)] == [0] * 6 + [10]
    now[0] = 10.0
    assert [wait(), wait()] == [0, 10]
    now[0] = 1000.0
    assert [wait() for _ in range(7)] == [0] * 6 + [10], "no more than those of a minute are kept"
    now[0] = 2000.0
    quotas.use("a", 90)
    assert wait() == 31, "30 tokens too many, and one that is needed"
    now[0] = 2031.0
    assert wait() == 0
    quotas.use("b", 5)
    quotas.take("b", NO_LIMITS, 99, 99)


def test_limits_are_read_from_the_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("alice:one rows=4 requests_per_minute=60\ntwo\ttokens_per_minute=5\nthree")
    assert [key.limits for key in Keys.read(file).all] == [KeyLimits(60, None, 4), KeyLimits(None, 5), NO_LIMITS]
    for wrong in ("rows", "rows=0", "rows=-1", "rows=x", "columns=3", "rows=1.5"):
        file.write_text(f"alice:secret {wrong}")
        with pytest.raises(InputError, match=r"line 1.*rows=N") as problem:
            Keys.read(file)
        assert "secret" not in str(problem.value)
