"""What only shows in a process of its own: imports, pipes, signals, terminals."""

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

import lade.version

LADE = [sys.executable, "-m", "lade"]
PROMPT = "say it again, say it"


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "PYTHONUNBUFFERED": "1"}


def test_help_version_and_recipe_come_without_torch(tmp_path):
    code = (
        "import sys, runpy\n"
        f"for words in '--help', 'generate --help', 'bench --help', '--version', 'export-recipe {tmp_path}':\n"
        "    sys.argv = ['lade', *words.split()]\n"
        "    try:\n        runpy.run_module('lade', run_name='__main__')\n"
        "    except SystemExit as end:\n        assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == 3 and f"lade {lade.version.__version__}" in done.stdout
    assert list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_pipe_through_python_m(environment, folder, plain, tokenizer):
    command, text = [*LADE, "generate", "-", "-m", folder, "-n", "20"], "hello é\n".encode()
    done = subprocess.run(command, input=text, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == tokenizer.decode(plain(tokenizer("hello é")["input_ids"], 20)) + "\n"
    statistics, explanation = done.stderr.decode().splitlines()[-2:]  # after what took longer than two seconds
    assert statistics.startswith("20 tokens in 1 + ") and explanation.startswith("Drafted in ")


@pytest.mark.slow
def test_ctrl_c_in_a_pipe(environment, folder):
    command, pipe = [*LADE, "generate", "-p", "hello", "-m", folder, "-n", "1000000"], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment)
    first = process.stdout.read(20)  # text comes while it is generated
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) == 20 and rest.endswith(b"\n")
    assert b"Traceback" not in errors
    interrupted, statistics, _ = errors.decode().splitlines()[-3:]
    assert interrupted == "interrupted" and "tokens in 1 + " in statistics


def on_a_terminal(arguments, environment, keys=(), program=LADE):
    """Output and exit code of a process on a pseudo terminal; `keys`: (what to wait for, what to type then)."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [*program, *map(str, arguments)], environment)
    output, waiting, seen = b"", list(keys), 0
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not data:
            break
        output += data
        while waiting and waiting[0][0] in output[seen:]:
            expected, typed = waiting.pop(0)
            seen = output.index(expected, seen) + len(expected)
            time.sleep(0.2)  # a prompt is shown a moment before it is read, and nobody types that fast
            os.write(terminal, typed)
    os.close(terminal)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return output.decode().replace("\r\n", "\n"), code


@pytest.mark.slow
def test_colours_on_a_terminal_are_the_steps(environment, folder, model, tokenizer):
    ids, expected, runs = tokenizer(PROMPT, return_tensors="pt")["input_ids"], "", 0
    config = lade.LookaheadConfig(budget=8)  # what the method chooses by itself depends on the clock
    for step in lade.stream(model, input_ids=ids, max_new_tokens=40, lookahead=config):
        text = tokenizer.decode(step.tokens)
        if len(step.tokens) > 1:
            runs += 1
            text = f"\x1b[1;{36 if runs % 2 else 32}m{text}\x1b[0m"
        expected += text
    assert runs > 2
    output, code = on_a_terminal(["generate", "-m", folder, "-p", PROMPT, "-n", 40, "--budget", 8], environment)
    assert code == 0
    assert f"\x1b[2m{PROMPT}\x1b[0m{expected}\x1b[2m [cut off: --max-new-tokens 40]" in output
    assert "colours:" in output and "40 tokens in 1 + " in output


@pytest.mark.parametrize(
    ("flags", "variables"),
    [([], {"NO_COLOR": "1"}), (["--no-color"], {}), ([], {})],
    ids=["variable", "flag", "neither"],
)
def test_no_color_means_no_colour_on_a_terminal(request, folder, monkeypatch, flags, variables):
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", **variables}  # to rich, a terminal
    shell = request.getfixturevalue("lade")
    output = shell("generate", "-m", folder, "-p", PROMPT, "-n", 20, *flags, env=terminal).output
    assert ("\x1b[1;3" in output) == (not flags and not variables)
    assert "20 tokens in" in output


@pytest.mark.slow
def test_a_chat_on_a_terminal(environment, templated, tmp_path):
    typed = (b"helo\x02l\n", b"\x03", b"/stats\n", b"\x04")  # Ctrl-B goes back one character
    keys = [(b"you> ", key) for key in typed]
    keys.insert(1, (b"tokens in", b""))
    environment = {**environment, "XDG_STATE_HOME": str(tmp_path / "state")}
    output, code = on_a_terminal(["chat", "-m", templated, "-n", 10, "--no-history"], environment, keys)
    assert code == 0, output
    assert "/quit or Ctrl-D ends the chat" in output
    assert "1 turn, " in output and "Traceback" not in output
    assert not (tmp_path / "state").exists()
