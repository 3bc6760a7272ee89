"""Limits that are read again while a server runs: those in flight keep theirs, and a wrong file changes nothing."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from served import SOON, Passes, running, slow_served, until, until_placed

from lade.errors import InputError
from lade.server.settings import Settings

WAITS = {"max_tokens": 30, "ignore_eos": True}


@pytest.fixture
def file(tmp_path):
    return tmp_path / "limits.toml"


def read_again(server):
    """Have the files read again, and wait until they have been: the server watches, one call after the other."""
    watch, done = server.service.watch, threading.Event()

    def watched():
        watch()
        if not server.service.reload:
            done.set()

    server.service.reload, server.service.watch = True, watched
    assert done.wait(SOON)
    del server.service.watch


def test_a_longer_queue_and_other_times_are_in_force_at_once(file, caplog):
    caplog.set_level(logging.INFO, "lade")
    file.write_text("max-waiting = 1\n")
    passes = Passes()
    with running(slow_served(wait=passes), max_rows=1, config=file) as server:
        answers, threads = [], []

        def ask(**fields):
            thread = threading.Thread(target=lambda: answers.append(server.complete(**WAITS, **fields).status_code))
            thread.start()
            threads.append(thread)

        ask()
        until_placed(server, passes, rows=1, waiting=0)
        ask()
        until_placed(server, passes, rows=1, waiting=1)
        assert server.complete().json()["error"]["code"] == "engine_overloaded"
        file.write_text("max-waiting = 2\nanswer-tokens = 3\nqueue-timeout = 0.2\n")
        read_again(server)
        until(lambda: server.service.serving.engine.snapshot().max_waiting == 2)
        assert server.complete().json()["error"]["code"] == "queue_timeout", "the third has a place, and waits"
        passes.let_all()
        for thread in threads:
            thread.join()
        assert answers == [200, 200], "those in flight have the times that they began with"
        file.write_text("answer-tokens = 3")
        read_again(server)
        assert server.complete(ignore_eos=True).json()["usage"]["completion_tokens"] == 3
        file.write_text("")
        read_again(server)
        assert server.service.settings.max_waiting == 32 and server.service.settings.queue_timeout is None
        read_again(server)
    assert "reloaded the limits" in caplog.messages


def test_a_wrong_file_changes_nothing_and_is_one_line(file, caplog):
    file.write_text("max-waiting = 7")
    with running(config=file) as server:
        before = server.service.settings
        file.write_text("answer-tokens = 5\nmax-waiting = 0")
        read_again(server)
        assert server.service.settings == before and server.complete(max_tokens=1).status_code == 200
        file.write_text("pass-timeout = 50")
        read_again(server)
        assert server.service.settings.pass_timeout == 50 and server.service.settings.max_waiting == 32
    (line,) = [each for each in caplog.messages if "keeping" in each]
    assert line.startswith(
        f"keeping the previous limits: config {str(file)!r}: Expected `int` >= 1 - at `$.max-waiting`: "
    )


def test_the_time_that_a_pass_may_take_is_that_of_the_file(file):
    passes = Passes()
    file.write_text("")
    with running(slow_served(wait=passes), config=file) as server, ThreadPoolExecutor(1) as pool:
        file.write_text("pass-timeout = 0.1")
        read_again(server)
        answer = pool.submit(server.complete, max_tokens=1)
        until(lambda: server.http.get("/live").status_code == 503)
        passes.let_all()
        assert answer.result().status_code == 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-rows = 3", "unknown field `max-rows`: it may have max-waiting, answer-tokens, queue-timeout"),
        ("max-waiting = 2.5", "Expected `int | null`, got `float` - at `$.max-waiting`"),
        ("max-waiting = true", "Expected `int | null`, got `bool` - at `$.max-waiting`"),
        ("queue-timeout = '5'", "Expected `float | null`, got `str` - at `$.queue-timeout`"),
        ("queue-timeout = -1", "Expected `float` >= 0.0 - at `$.queue-timeout`"),
        ("queue-timeout = nan", "at `$.queue-timeout`"),
        ("request-timeout = 0", "Expected `float` > 0.0 - at `$.request-timeout`"),
        ("queue-timeout", "Expected '=' after a key"),
        ("[a]\nb = 1", "unknown field `a`"),
    ],
)
def test_what_is_wrong_is_named(file, text, words):
    file.write_text(text)
    with pytest.raises(InputError) as raised:
        Settings(config=file).current()
    assert words in str(raised.value) and str(file) in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_comes_before_options(file):
    file.write_text("queue-timeout = 5")
    found = Settings(config=file, queue_timeout=9.0, max_waiting=3).current()
    assert (found.queue_timeout, found.max_waiting) == (5, 3)
    file.unlink()
    with pytest.raises(InputError, match="No such file"):
        Settings(config=file).current()
