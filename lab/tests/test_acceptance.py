"""`python -m lade_lab acceptance`: all checks pass at the embedded model, and each can fail."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from lade.cli.options.model import ModelChoice
from lade.cli.terminal import Terminal
from lade.errors import InputError
from lade_lab.acceptance import checks
from lade_lab.acceptance.checks import CHECKS, FailedError, check_schema
from lade_lab.acceptance.command import run, timed
from lade_lab.live_server import Answer


@pytest.mark.slow
def test_the_embedded_model_passes(tmp_path):
    command = [sys.executable, "-m", "lade_lab", "acceptance", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    told = json.loads(ended.stdout)
    lines = told.pop("checks")
    assert ended.returncode == 0 and all(line["passed"] for line in lines), lines
    assert [line["check"] for line in lines] == [*CHECKS, "two models in turn", "log of the server"]
    assert told["context"] == 1024 and told["dtype"] == "float32"


def test_an_argument_that_is_no_model_is_an_error_of_the_user(tmp_path):
    with pytest.raises(InputError, match=r"none\.gguf"):
        run(ModelChoice("./none.gguf"), 10**9, None, [""], tmp_path, Terminal())


@pytest.mark.parametrize("text", ["", "[]", '{"name": "a"}', '{"name": 1, "count": 1}', '{"name": "a", "count": 100}'])
def test_json_beside_its_schema_is_found(text):
    check_schema('{"name": "a", "count": 99}', "here")
    with pytest.raises((FailedError, ValueError), match=r"here|Expecting value"):
        check_schema(text, "here")


class Server:
    """Answers by a function of the body."""

    def __init__(self, says):
        self.says = says

    def ask(self, path, **body):
        return Answer([[("text", self.says(path, body))]] * body.get("n", 1), ["stop" if "stop" in body else "length"])


def test_checks_fail_where_answers_differ():
    steady = Server(lambda path, body: "abcdefghijkl")
    assert "pairs equal" in checks.streamed_as_whole(steady) and "three seeds" in checks.seeds(steady)
    with pytest.raises(FailedError, match="differ"):
        checks.streamed_as_whole(Server(lambda path, body: "s" if body.get("stream") else "w"))
    with pytest.raises(FailedError, match="choices of n=3"):
        checks.seeds(Server(lambda path, body: str(body.get("n", 1))))
    with pytest.raises(FailedError, match="stop 'defg'"):
        checks.stop_texts(steady)
    with pytest.raises(FailedError, match="a mark"):
        checks.reasoning(Server(lambda path, body: "</think>x"))


def test_the_secret_is_once_in_the_notes():
    tokenizer = lambda text, add_special_tokens: {"input_ids": text.split()}  # noqa: E731
    notes = checks.haystack(SimpleNamespace(loaded=SimpleNamespace(tokenizer=tokenizer)), 500)
    assert notes.count(checks.SECRET) == 1 and 400 < len(notes.split()) <= 500


def test_a_fault_of_a_check_is_a_line_of_the_table():
    def fails():
        raise FailedError("why")

    assert timed("a", lambda: "fine")[:3] == ("a", True, "fine")
    assert timed("a", fails)[:3] == ("a", False, "why")
    assert timed("a", lambda: {}["x"])[:3] == ("a", False, "KeyError('x')")
