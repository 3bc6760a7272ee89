"""What is typed: lines that belong together, editing and history on a terminal."""

import io
import os
import stat
import sys

import pytest
from pretend import without
from test_processes import on_a_terminal

from lade.cli import chat
from lade.cli.chat import Entry, LineInput

READER = """
import sys
from pathlib import Path
from lade.cli.chat import LineInput
lines = LineInput(Path(sys.argv[1]) if sys.argv[1:] else None)
print(lines.problem or "ready")
while True:
    try:
        if (entry := lines.entry("you> ")) is None:
            break
        print("got", entry.text.splitlines())
    except KeyboardInterrupt:
        print("stopped")
"""


@pytest.fixture
def entries(monkeypatch):
    def read(text):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        lines, found = LineInput(), []
        while (entry := lines.entry("you> ")) is not None:
            found.append(entry)
        return found

    return read


@pytest.fixture
def typed():
    """What the reader prints when these keys are pressed at its prompts, one after the other."""

    def run(*keys, history=None):
        arguments = [] if history is None else [history]
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"}
        waiting = [(b"> ", key) for key in (*keys, b"\x04")]
        output, code = on_a_terminal(arguments, environment, waiting, [sys.executable, "-c", READER])
        assert code == 0, output
        lines = output.replace("\r", "\n").splitlines()
        return [line for line in lines if line.startswith(("got", "stopped", "ready", "the "))]

    return run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n", [Entry("one"), Entry("two")]),
        ("  one \n\n", [Entry("  one "), Entry("")]),
        ("no end", [Entry("no end")]),
        ("one\\\ntwo\\\nthree\nfour\n", [Entry("one\ntwo\nthree"), Entry("four")]),
        ("one\\", [Entry("one\\")]),
        ('"""\none\n\n  two\n"""\nthree\n', [Entry("one\n\n  two", quoted=True), Entry("three")]),
        ('"""one\ntwo\\\nthree"""\n', [Entry("one\ntwo\\\nthree", quoted=True)]),
        ('  """/usr is a folder"""  \n', [Entry("/usr is a folder", quoted=True)]),
        ('"""one\ntwo', [Entry("one\ntwo", quoted=True)]),
        ('""""""\n', [Entry("", quoted=True)]),
    ],
)
def test_lines_that_belong_together(entries, text, expected):
    assert entries(text) == expected


def test_a_terminal_edits_and_remembers_keeps_pasted_lines_together_and_drops_what_ctrl_c_is_typed_behind(typed):
    up, home = b"\x1b[A", b"\x01"
    edited = b"helo\x02l\n", up + home + b"oh \n", up + up + b"!\n"
    assert typed(*edited, b"\x1b[200~one\ntwo\x1b[201~\n", b"one\\\n", b"tw\x03", b"three\n") == [
        "ready", "got ['hello']", "got ['oh hello']", "got ['hello!']", "got ['one', 'two']", "stopped",
        "got ['three']",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_history_is_kept_from_one_chat_to_the_next_and_for_the_user_alone(typed, tmp_path):
    history = tmp_path / "state" / "chat_history"
    typed(b"first\n", b"second\n", b"second\n", history=history)
    assert typed(b"\x1b[A\x1b[A?\n", history=history) == ["ready", "got ['first?']"]
    assert history.read_text().split() == ["first", "second", "first?"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_a_history_that_cannot_be_kept_is_said_and_nothing_else(typed, tmp_path):
    (tmp_path / "state").touch()
    said, got = typed(b"first\n", history=tmp_path / "state" / "chat_history")
    assert said.startswith("the history cannot be kept in ") and got == "got ['first']"


def test_without_readline_there_is_no_editing_and_no_file(entries, monkeypatch, tmp_path):
    without(monkeypatch, "readline")
    monkeypatch.setattr(LineInput, "edits", True)
    monkeypatch.setattr("builtins.input", lambda prompt: "one")
    lines = LineInput(tmp_path / "history")
    assert lines.entry("you> ") == Entry("one")
    assert list(tmp_path.iterdir()) == []


def test_the_history_is_among_the_states_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setattr(chat.platformdirs, "user_state_dir", lambda name, appauthor: str(tmp_path / name))
    assert chat.history_path() == tmp_path / "lookahead-decoding" / "chat_history"
