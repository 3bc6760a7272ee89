"""`lade warm`, and `--memory` of the commands that use what it has filled."""

import json
import signal
from types import SimpleNamespace

import pytest
from shell_fixtures import CONTEXT, press_ctrl_c
from spies import failing, watched
from test_cli_errors import fails

from lade import InputError, Memory
from lade.cli import warm as module
from lade.cli.loading import LoadedModel
from lade.cli.warm import WarmResult
from lade.memory import fingerprint_of
from lade.stats import Stats

TEXTS = ["say it again, say it", "one two three", "say it again, say it"]
NEW = 24


@pytest.fixture
def prompts(prompt_lines):
    return prompt_lines(*TEXTS)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "texts.memory"


@pytest.fixture
def warm(lade, folder, prompts, out):
    def run(*arguments, env=None):
        return lade("warm", "-m", folder, "--prompts", prompts, "--out", out, "-n", NEW, *arguments, env=env)

    return run


def test_it_fills_a_memory_with_what_the_model_says_and_sums_it_up(warm, out, folder, tokenizer):
    result = warm("--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert (report["model"], report["dtype"], report["packed"]) == (str(folder), "float32", False)
    assert (report["prompts"], report["new_tokens"], report["skipped"]) == (3, 3 * NEW, [])
    assert (report["continued"], report["interrupted"], report["out"]) == (False, False, str(out))
    assert report["file_bytes"] == out.stat().st_size > 0 and report["seconds"] > 0
    assert report["tokens_per_step"] == pytest.approx((3 * NEW - 3) / report["steps"])
    assert report["tokens_per_step_last_tenth"] > report["tokens_per_step_first_tenth"], "the third is the first again"
    memory = Memory.load(out, tokenizer)
    assert len(memory) == report["contexts"] > 0
    assert memory.fingerprint == fingerprint_of(tokenizer) and memory.max_bytes == 128 * 2**20
    assert (memory.weights != Memory().weights).any()
    result = warm("--fresh")
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    lines = dict(line.split(None, 1) for line in result.stdout.splitlines())
    assert lines["prompts"].strip() == "3" and lines["contexts"].strip() == str(len(Memory.load(out)))
    assert f"{3 * NEW}" in result.stdout and "in the first tenth of the prompts" in result.stdout


def test_it_goes_on_with_a_memory_that_is_there_and_takes_several_files(warm, out, tmp_path):
    first = json.loads(warm("--json", "--limit", 1).stdout)
    assert first["prompts"] == 1
    text = tmp_path / "prompt.txt"
    text.write_text("two\nlines\n")
    result = warm("--prompts", text, "--json")
    report = json.loads(result.stdout)
    assert report["continued"] is True and report["prompts"] == 4
    assert f"continuing with the {first['contexts']} contexts" in result.stderr
    assert report["contexts"] > first["contexts"]
    assert report["tokens_per_step_first_tenth"] > first["tokens_per_step_first_tenth"], "it knows that one"
    result = warm("--json", "--limit", 1, "--fresh")
    again = json.loads(result.stdout)
    assert again["continued"] is False and result.stderr == ""
    assert again["contexts"] < report["contexts"]
    assert len(Memory.load(out)) == again["contexts"]


@pytest.mark.slow
def test_the_size_of_the_memory(warm, out):
    warm("--max-mib", 3)
    assert Memory.load(out).max_bytes == 3 * 2**20
    warm("--max-mib", 1)
    assert Memory.load(out).max_bytes == 2**20
    warm()
    assert Memory.load(out).max_bytes == 2**20, "as it was"


def test_prompts_that_do_not_fit_are_skipped(warm, prompts, prompt_lines):
    prompt_lines(*TEXTS, "x" * CONTEXT, "fine")
    result = warm("--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["prompts"] == 4 and report["new_tokens"] == 4 * NEW
    ((name, reason),) = [skipped.values() for skipped in report["skipped"]]
    assert name == f"{prompts} prompt 4" and str(CONTEXT) in reason
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"skipped: {name}: ") and "shorten the prompt" in line
    result = warm()
    assert result.exit_code == 1 and "4, 1 skipped" in result.stdout


def test_where_nothing_fits_nothing_is_saved_and_texts_end_with_the_context(warm, prompt_lines, out):
    warm()
    before = out.read_bytes()
    prompt_lines("x" * CONTEXT)
    for arguments in (["--fresh"], []):
        result = warm("--json", *arguments)
        assert result.exit_code == 1 and json.loads(result.stdout)["prompts"] == 0
        assert out.read_bytes() == before, "an empty memory does not replace a good one"
    out.unlink()
    assert json.loads(warm("--json").stdout)["file_bytes"] == 0
    assert warm().exit_code == 1 and not out.exists()
    prompt_lines("x" * (CONTEXT - 5))
    assert json.loads(warm("--json").stdout)["new_tokens"] == 5


def test_ctrl_c_saves_what_it_has(warm, out, at_step, tokenizer):
    at_step(3, press_ctrl_c, text=2)
    before = signal.getsignal(signal.SIGINT)
    result = warm("--json")
    assert result.exit_code == 130
    assert signal.getsignal(signal.SIGINT) is before
    report = json.loads(result.stdout)
    assert report["interrupted"] is True and report["prompts"] == 2
    assert NEW < report["new_tokens"] < 2 * NEW
    assert f"interrupted: {str(out)!r} has the contexts so far" in result.stderr and "Traceback" not in result.stderr
    assert len(Memory.load(out, tokenizer)) == report["contexts"] > 0


def test_ctrl_c_between_two_prompts_is_heard_too(warm, out, monkeypatch):
    asked = []
    asked = watched(monkeypatch, LoadedModel, "check", lambda *_: press_ctrl_c() if len(asked) == 1 else None)
    result = warm("--json")
    assert result.exit_code == 130 and json.loads(result.stdout)["prompts"] == 2
    assert len(Memory.load(out)) > 0


def test_it_saves_now_and_then(warm, out, monkeypatch):
    """Whatever ends it: what was saved before is there."""
    monkeypatch.setattr(module, "SAVE_EVERY_S", 0.0)
    failing(monkeypatch, LoadedModel, "check", RuntimeError("the machine is gone"), calls={3})
    seen = watched(monkeypatch, LoadedModel, "check", lambda *_: len(Memory.load(out)) if out.exists() else 0)
    assert isinstance(warm().exception, RuntimeError)
    assert 0 == seen[0] < seen[1] < seen[2] == len(Memory.load(out))


def test_a_bar_on_a_terminal(warm):
    result = warm(env={"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "3/3" in result.stderr and "tokens per step" in result.stderr


def test_tenths():
    def run(steps, tokens):
        return Stats(1, 1 + steps * tokens, steps, accepted_tokens=steps * tokens)

    runs = [run(10, 1), run(10, 2), *[run(1, 7) for _ in range(16)], run(5, 3), run(15, 5)]
    harvest = WarmResult(runs)
    assert harvest.rates() == (1.5, 4.5, pytest.approx((10 + 20 + 16 * 7 + 15 + 75) / 56))
    assert WarmResult(runs[:2]).rates()[:2] == (1, 2)
    assert WarmResult().rates() == (0, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-mib", 0], ["--max-mib 0", ">= 1"]),
        (["--limit", 0], ["--limit 0", ">= 1"]),
        (["-n", 0], ["--max-new-tokens 0"]),
        (["--out", "no/such/folder/m"], ["--out no/such/folder/m"]),
        (["--out", "."], ["--out .", "regular file"]),
        (["--prompts", "none.jsonl"], ["none.jsonl", "No such file"]),
        (["--dtype", "int8"], ["int8"]),
    ],
)
def test_wrong_options_are_named_before_any_work(warm, out, arguments, words):
    fails(warm(*arguments), *words)
    assert not out.exists()


def test_a_model_that_cannot_be_served_fills_nothing(lade, unsupported, prompts, out):
    ran = lade("warm", "-m", unsupported, "--prompts", prompts, "--out", out)
    fails(ran, "GPTNeoForCausalLM", "; lade generate decodes it plainly")
    assert not out.exists() and "lookahead=" not in ran.stderr, "what cannot be typed is not told"


def test_a_memory_of_another_tokenizer_or_a_damaged_one(warm, lade, folder, out):
    Memory().save(out, SimpleNamespace(get_vocab=lambda: {"a": 0}))
    for problem in ("tokenizer", "damaged"):
        fails(warm(), out, problem, "lade warm")
        fails(lade("generate", "-m", folder, "-p", "x", "--memory", out), out, problem, "lade warm")
        fails(lade("chat", "-m", folder, "--memory", out), out, problem)
        if problem == "tokenizer":
            assert warm("--fresh").exit_code == 0
            out.write_bytes(out.read_bytes()[:-1])
    with pytest.raises(InputError):
        Memory.load(out)
    assert warm("--fresh").exit_code == 0


def test_a_memory_makes_generation_faster_and_stays_as_it_is(warm, lade, report, folder, out, plain, tokenizer):
    warm()
    before, expected = out.read_bytes(), plain(tokenizer(TEXTS[0])["input_ids"], NEW)
    arguments = ["generate", "-m", folder, "-p", TEXTS[0], "-n", NEW, "--budget", 8]
    found, without = (report(*arguments, *more) for more in (["--memory", out], []))
    assert found["token_ids"] == without["token_ids"] == expected
    assert found["steps"] < without["steps"]
    assert found["config"]["memory"] is True and without["config"]["memory"] is False
    result = lade("chat", "-m", folder, "-n", NEW, "--memory", out, "--budget", 8, stdin=TEXTS[0] + "\n")
    assert (result.exit_code, result.stdout) == (0, tokenizer.decode(expected) + "\n"), result.output
    assert "adaptive, budget 8, memory" in result.stderr
    assert out.read_bytes() == before
    result = lade("generate", "-m", folder, "-p", TEXTS[0], "-n", NEW, "--memory", out)
    assert any(line.endswith("· adaptive, memory") for line in result.stderr.splitlines())
