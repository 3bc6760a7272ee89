"""The log of a server: when, how bad, what was asked; and nothing of what machines ask every few seconds."""

import functools
import json
import logging
import re
from datetime import UTC, datetime, timedelta

import pytest
from served import running, until
from spies import failing

from lade.server.access_log import AccessLog
from lade.server.served_model import ServedModel
from lade.server.settings import PROBES

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


@pytest.fixture(params=[False, True], ids=["text", "json"])
def logged(request):
    """A server, and what its lines say, by name."""
    as_json = request.param
    with running(log=functools.partial(AccessLog, as_json=as_json)) as server:

        def facts(count):
            until(lambda: len(server.lines) >= count)
            if as_json:
                return [json.loads(line) for line in server.lines]
            found = [re.fullmatch(rf"({STAMP}) (\w+) +(id=.*)", line) for line in server.lines]
            words = [dict(word.split("=", 1) for word in match[3].split()) for match in found]
            return [{"time": match[1], "level": match[2], **named} for match, named in zip(found, words, strict=True)]

        yield server, facts


def test_a_line_says_when_and_what_was_asked_and_how_bad_it_was(logged):
    server, facts = logged
    server.http.get("/v1/models")
    server.complete("a", temperature=-1)
    server.service.drain()
    server.complete("a")
    lines = facts(3)
    asked = [(line["method"], line["path"], str(line["status"]), line["level"]) for line in lines]
    assert asked == [
        ("GET", "/v1/models", "200", "info"),
        ("POST", "/v1/completions", "400", "info"),
        ("POST", "/v1/completions", "503", "warning"),
    ]
    for line in lines:
        told = datetime.fromisoformat(line["time"])
        assert abs(datetime.now(UTC) - told) < timedelta(minutes=5)


def test_probes_have_no_lines(logged):
    server, facts = logged
    for path in sorted(PROBES):
        assert server.http.get(path).status_code == 200
    server.http.get("/v1/models")
    assert [line["path"] for line in facts(1)] == ["/v1/models"]


def test_probes_have_lines_where_everything_is_asked_for():
    with running(log=functools.partial(AccessLog, as_json=True, debug=True)) as server:
        server.http.get("/live")
        until(lambda: server.lines)
    assert json.loads(server.lines[0])["path"] == "/live"


def test_what_the_library_logs_is_in_it_with_the_traceback_of_an_error(monkeypatch):
    """Clients are told that the log has it."""
    lines = []
    log = AccessLog(lines.append, as_json=True)
    with running() as server, log.listening():
        failing(monkeypatch, ServedModel, "ids", ZeroDivisionError("what went wrong"))
        answer = server.complete("a")
        assert answer.status_code == 500
        logging.getLogger("lade.some.module").info("measuring %d things", 3)
        logging.getLogger("lade.some.module").debug("not this")
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    found = [json.loads(line) for line in lines]
    assert [line["level"] for line in found] == ["error", "info", "warning"]
    assert answer.headers["x-request-id"] in found[0]["message"]
    assert "Traceback" in found[0]["message"] and "ZeroDivisionError: what went wrong" in found[0]["message"]
    assert found[1]["message"] == "measuring 3 things"
    logging.getLogger("lade.some.module").error("and not this any more")
    assert len(lines) == 3
