"""No silent second on a terminal; elsewhere a line for what takes two."""

import json
import logging
import re
import time

import pytest
from pretend import no_warm_up
from rich.console import Console
from rich.progress import Progress

from lade.cli import terminal as module
from lade.cli.loading.from_pretrained import find
from lade.cli.options import Output
from lade.cli.options.model import Loading
from lade.cli.terminal import Status, Terminal, terminal

PROMPT = "say it again, say it"
TERMINAL = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "120"}
GONE = "\x1b[1A\x1b[2K"
"""One line up, and all of it erased."""


class AtOnce:
    """A timer that does not wait, in the thread that has started it."""

    daemon = False

    def __init__(self, seconds, function, arguments):
        self._call = lambda: function(*arguments)

    def start(self):
        self._call()

    def cancel(self):
        pass


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "Timer", AtOnce)


@pytest.fixture
def on_a_terminal(monkeypatch):
    for name, value in TERMINAL.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def tempo(monkeypatch):
    """Sets the seconds until work off a terminal is named by a line, and until it is named again."""

    def use(line=0.08, every=60.0):
        monkeypatch.setattr(module, "LINE_S", line)
        monkeypatch.setattr(module, "LINE_EVERY_S", every)

    use()
    return use


@pytest.fixture
def generate(lade, folder):
    def run(*arguments, model=folder, **variables):
        return lade("generate", "-m", model, "-n", 8, PROMPT, *arguments, env=variables)

    return run


def texts(output):
    """What was said, each text once, without wheels, times and control codes."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    found = [match[1] for match in re.finditer(r"[⠀-⣿] (.+?) 0:0\d:\d\d", plain)]
    return [text for place, text in enumerate(found) if text not in found[:place]]


# In commands


def test_a_terminal_sees_each_stage_and_json_is_only_json(generate, folder):
    result = generate(**TERMINAL)
    assert result.exit_code == 0, result.output
    assert texts(result.stderr) == [
        "starting: importing torch and transformers", f"looking for {folder.name}", f"loading {folder}",
        "packing the weights", "reading the prompt",
    ]  # fmt: skip
    assert GONE in result.stderr and "⠋" not in result.stdout
    result = generate("--json", **TERMINAL)
    assert json.loads(result.stdout)["new_tokens"] == 8
    assert texts(result.stderr)[-1] == "decoding"


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_pipe_sees_nothing_of_it(generate, arguments):
    result = generate(*arguments)
    assert not re.search("[⠀-⣿]|loading|\x1b", result.output)
    assert len(result.stderr.splitlines()) == (0 if arguments else 2)  # figures, and what they mean


def test_quiet_is_quiet(generate, unsupported):
    assert generate("--quiet", **TERMINAL).stderr == generate("-q").stderr == generate(LADE_QUIET="1").stderr == ""
    assert generate("-q").stdout == generate().stdout
    assert "running at normal speed" in generate("-q", model=unsupported).stderr, "warnings stay"
    assert generate("-q", "--dtype", "int3", **TERMINAL).stderr.count("error:") == 1, "and so do errors"


def test_an_error_takes_its_place(generate, tmp_path):
    result = generate(model=tmp_path / "none", **TERMINAL)
    assert result.exit_code == 2
    assert result.stderr.index(GONE) < result.stderr.index("error:")
    assert texts(result.stderr.split("error:")[1]) == []


def test_a_chat_a_demo_and_a_run_of_many_prompts_begin_with_it(lade, folder, tmp_path, prompt_lines, monkeypatch):
    no_warm_up(monkeypatch)
    for words, stdin in (
        (["chat", "-n", 4], "/quit\n"),
        (["demo", "-p", PROMPT, "--plain-text", "-n", 4], None),
        (["batch", "-i", prompt_lines(PROMPT), "-o", tmp_path / "o"], None),
    ):
        result = lade(*words, "-m", folder, stdin=stdin, env=TERMINAL)
        assert result.exit_code == 0, result.output
        assert f"loading {folder}" in texts(result.stderr)


@pytest.mark.one_in(2)
def test_a_download_has_bars_on_a_terminal_only(lade, hub, tmp_path):
    def info(folder, *arguments, **variables):
        variables["TQDM_POSITION"] = "-1"  # else they ask the system
        result = lade("info", "-m", "some/model", "--cache-dir", tmp_path / folder, *arguments, env=variables)
        assert result.exit_code == 0, result.output
        return result.stderr

    bars = re.compile(r"model\.safetensors.*100%")
    assert bars.search(info("a", **TERMINAL))
    again = info("a", **TERMINAL)
    assert not bars.search(again) and "loading some/model" in texts(again), "it is there already"
    for number, arguments in enumerate([[], ["--json"], ["--quiet"]]):
        variables = TERMINAL if arguments == ["--quiet"] else {}
        assert info(f"b{number}", *arguments, **variables) == ""


def test_a_download_that_was_broken_off_has_bars_again(hub, tmp_path, folder):
    """The index is there, a part that it names is not."""
    loading = Loading("some/model", cache_dir=tmp_path)
    assert find(loading).download
    commit = hub.commit("some/model", "main")
    snapshot = tmp_path / "models--some--model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.st", "b": "2.st"}}))
    (snapshot / "1.st").touch()
    assert find(loading).download
    (snapshot / "2.st").touch()
    assert not find(loading).download


# What the library logs


def test_what_the_library_logs_is_what_it_is_doing(on_a_terminal, capsys):
    logger = logging.getLogger("lade")
    before = logger.level, list(logger.handlers)
    with terminal():
        logging.getLogger("lade.tuning.cost_cache").info("measuring the cost of a step")
        logging.getLogger("lade.tuning.cost_cache").debug("details")
    said = texts(capsys.readouterr().err)
    assert said == ["starting: importing torch and transformers", "measuring the cost of a step"]
    with terminal(Output(debug=True)):
        logging.getLogger("lade.tuning.cost_cache").debug("details")
    assert "lade.tuning.cost_cache: details" in capsys.readouterr().err
    assert (logger.level, logger.handlers) == before


def test_a_warning_in_the_log_is_a_line(capsys):
    with terminal(Output(quiet=True)):
        logging.getLogger("lade.tuning.cost_cache").info("nothing")
        logging.getLogger("lade.tuning.cost_cache").warning("the folder is gone")
        logging.getLogger("lade.server.service").warning("16 bits; loading the model in float32 prevents it")
    assert capsys.readouterr().err == "the folder is gone\n16 bits; --dtype float32 prevents it\n"


# The line itself


def test_within_a_line_of_text_there_is_none(on_a_terminal, capsys):
    """Such as a prompt, which its continuation follows: taking the line away would erase it."""
    term = Terminal()
    term.write("Once upon")
    term.show_status("decoding")
    term.write(" a time\n")
    assert capsys.readouterr().err == ""
    term.show_status("decoding")
    term.status.hide()
    assert texts(capsys.readouterr().err) == ["decoding"]


def test_a_timer_that_is_late_shows_nothing(monkeypatch):
    console, waiting = Console(force_terminal=True, width=80, file=None, record=True), []
    status = Status(console, shown=True)
    monkeypatch.setattr(AtOnce, "start", lambda self: waiting.append(self._call))
    status.show("over before it began")
    status.hide()
    for call in waiting:
        call()
    assert console.export_text() == ""


def test_a_bar_keeps_it_away(on_a_terminal, capsys):
    term = Terminal()
    with Progress(console=term.err) as progress:
        progress.add_task("a bar", total=1)
        term.show_status("hidden")
    term.show_status("seen")
    term.status.hide()
    assert texts(capsys.readouterr().err) == ["seen"]


@pytest.mark.parametrize("say", [Terminal.say, Terminal.write, lambda term, text: term.out.print(text)])
def test_whatever_is_said_takes_its_place(on_a_terminal, capfd, say):
    term = Terminal()
    term.show_status("working")
    begun = capfd.readouterr().err
    say(term, "said")
    said = capfd.readouterr()
    assert "working" in begun and GONE not in begun
    assert GONE in said.err and "said" in said.out + said.err.split(GONE)[1]
    assert "working" not in texts(said.err.split(GONE)[1])


# Off a terminal


def test_off_a_terminal_what_takes_long_is_a_line_once(tempo, capsys):
    with terminal() as term:
        for text in ("loading a model", "soon over", "loading a model"):
            term.show_status(text)
            if text != "soon over":
                time.sleep(0.25)
        logging.getLogger("lade.tuning.cost_cache").info("measuring the cost of a step")
        time.sleep(0.25)
    assert capsys.readouterr() == ("", "loading a model\nmeasuring the cost of a step\n")


def test_work_that_goes_on_gives_signs_of_life(tempo, capsys):
    tempo(every=0.1)
    with terminal() as term:
        term.show_status("loading a model")
        time.sleep(0.4)
    assert re.match(r"loading a model\n(loading a model: [01] s so far\n)+$", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("output", "ends"),
    [
        (Output(), lambda term: term.write("a text\n")),
        (Output(), lambda term: (term.status.close(), term.show_status("more"))),
        (Output(quiet=True), lambda term: term.status.tell("1 of 2 prompts")),
        (Output(debug=True), lambda term: term.status.tell("1 of 2 prompts")),
    ],
    ids=["a text", "the end", "quiet", "debug"],
)
def test_what_ends_the_work_and_quiet_and_debug_have_no_such_lines(tempo, capsys, output, ends):
    with terminal(output) as term:
        term.show_status("loading a model")
        ends(term)
        time.sleep(0.25)
    assert capsys.readouterr().err == ""


def test_progress_is_told_now_and_then(tempo, capsys):
    tempo(every=0.0)
    with terminal() as term:
        term.status.tell("1 of 3 prompts")
        tempo(every=60.0)
        term.status.tell("2 of 3 prompts")
    assert capsys.readouterr().err == "1 of 3 prompts\n"


def test_many_prompts_tell_their_progress(lade, tempo, folder, tmp_path, prompt_lines, monkeypatch):
    no_warm_up(monkeypatch)
    tempo(line=600.0, every=0.0)
    for what, words in {
        "requests": ["batch", "-i", prompt_lines(PROMPT), "-o", tmp_path / "o"],
        "prompts": ["warm", "--prompts", prompt_lines(PROMPT), "--out", tmp_path / "w.lade", "-n", 4],
    }.items():
        result = lade(*words, "-m", folder)
        assert result.exit_code == 0, result.output
        assert f"1 of 1 {what}" in result.stderr
