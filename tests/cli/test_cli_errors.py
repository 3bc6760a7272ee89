import json
import sys
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from shell_fixtures import CONTEXT

from lade.cli.generate import Asked
from lade.errors import InputError


def fails(result, *words):
    """One line on standard error that has all the words; exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert str(word) in line, line


@pytest.fixture
def generate(lade, folder):
    def run(*arguments, model=folder, prompt="hello", stdin=None):
        return lade("generate", "-m", model, *(["-p", prompt] if prompt is not None else []), *arguments, stdin=stdin)

    return run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--window", -1], ["--window -1", ">= 0"]),
        (["--ngram", 1], ["--ngram 1", ">= 2"]),
        (["--guesses", -2], ["--guesses -2", ">= 0"]),
        (["--max-new-tokens", 0], ["--max-new-tokens 0", ">= 1"]),
        (["--method", "magic"], ["magic", "plain, lookahead, adaptive, auto"]),
        (["--method", "plain", "--window", 3], ["--window 3", "leave out"]),
        (["--dtype", "int8"], ["int8", "float32"]),
        (["--device", "abacus"], ["abacus", "cpu"]),
        (["--device", "cuda:99"], ["cuda:99", "cpu"]),
        (["-"], ["--prompts"]),
        (["hello"], ["--prompts"]),
    ],
)
def test_options_out_of_range(generate, arguments, words):
    fails(generate(*arguments), *words)


def test_prompts_that_are_none(generate, monkeypatch):
    fails(generate(prompt=""), "empty")
    for dash in ([], ["-"]):
        for stdin in ("", "\n"):
            fails(generate(*dash, prompt=None, stdin=stdin), "standard input", "--prompts")
    fails(generate("", prompt=None), "empty")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(InputError, match=r"exactly one prompt .* --prompts FILE, or through a pipe"):
        Asked().read()
    monkeypatch.undo()
    fails(generate("-", prompt=None, stdin=b"caf\xe9 au lait"), "standard input", "not UTF-8", "byte 3")
    fails(generate(prompt="caf\udce9"), "not UTF-8")
    fails(generate(prompt="x" * CONTEXT), CONTEXT, "shorten")


def test_prompt_files(generate, tmp_path):
    fails(generate("--prompts", tmp_path / "none.txt", prompt=None), "none.txt", "No such file")
    fails(generate("--prompts", tmp_path, prompt=None), tmp_path, "directory")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 au lait")
    fails(generate("--prompts", latin, prompt=None), "latin.txt", "not UTF-8 at byte 3")
    latin.write_text("")
    fails(generate("--prompts", latin, prompt=None), "empty")
    lines = tmp_path / "p.jsonl"
    good = '{"prompt": "fine"}\n'
    for bad, words in [
        ("{", ["line 2", "JSON"]),
        ('{"text": "a"}', ["line 2", '"prompt"']),
        ('["a"]', ["line 2", '"prompt"']),
        ('{"prompt": 3}', ["line 2", '"prompt"']),
        ('{"prompt": ""}', ["line 2", "empty"]),
        ('{"prompt": "\\ud800"}', ["line 2", "UTF-8"]),
    ]:
        lines.write_text(good + bad + "\n")
        fails(generate("--prompts", lines, prompt=None), *words)
    lines.write_text("\n")
    fails(generate("--prompts", lines, prompt=None), "no lines")


@pytest.mark.slow
def test_model_folders(generate, folder, tmp_path, edited):
    fails(generate(model=tmp_path / "none"), "none")
    fails(generate(model="./none"), "'./none'")
    fails(generate(model=folder / "config.json"), "is a file")
    fails(generate(model=tmp_path), "no config.json")
    short = edited(folder, tmp_path / "short")
    with open(short / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    fails(generate(model=short), "short", "complete")
    bare = edited(folder, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    fails(generate(model=bare), "model.safetensors")
    torn = edited(folder, tmp_path / "torn")
    (torn / "config.json").write_text("{")
    fails(generate(model=torn), "torn", "JSON")
    fails(generate(model=edited(folder, tmp_path / "new", config={"model_type": "nonesuch"})), "nonesuch")
    fails(generate(model=edited(folder, tmp_path / "t5", config={"model_type": "t5"})), "not a causal language model")


def test_checkpoints_without_a_head_or_a_tokenizer_of_the_model(generate, model, folder, tmp_path, edited):
    model.model.save_pretrained(headless := edited(folder, tmp_path / "headless"))
    fails(generate(model=headless), "lm_head.weight")
    for file in (copy := edited(folder, tmp_path / "mute")).glob("tokenizer*"):
        file.unlink()
    fails(generate(model=copy), "mute", "tokenizer")
    broken = edited(folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    fails(generate(model=broken), "broken", "tokenizer")
    other = edited(folder, tmp_path / "other")
    data = json.loads((other / "tokenizer.json").read_text())
    data["model"]["vocab"]["h"] = 4000
    (other / "tokenizer.json").write_text(json.dumps(data))
    fails(generate("--method", "plain", model=other), "4000", "257")


def test_a_hub_out_of_reach_is_said_at_once(generate, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    fails(generate(model="someone/no-such-model"), "someone/no-such-model", "network")


def test_an_explicit_method_is_not_replaced(generate, lade, unsupported):
    for arguments in (["--method", "lookahead"], ["--window", 3], ["--method", "adaptive"], ["--budget", 6]):
        fails(generate(*arguments, model=unsupported), "GPTNeoForCausalLM", "plain")
    fails(lade("demo", "-m", unsupported, "-p", "x"), "GPTNeoForCausalLM")
    fails(lade("chat", "-m", unsupported, "--method", "lookahead"), "GPTNeoForCausalLM")


def test_the_other_commands(lade, folder, tmp_path):
    fails(lade("info", "-m", tmp_path), "no config.json")
    fails(lade("chat", "-m", tmp_path), "no config.json")
    fails(lade("demo", "-m", folder, "-n", 0), "--max-new-tokens 0")
    fails(lade("demo", "-m", folder, "-p", ""), "empty")


def test_debug_shows_the_traceback_and_unknown_options_are_usage_errors(lade, generate, tmp_path):
    assert generate("--no-such").exit_code == lade("nonsense").exit_code == 2
    result = generate("--debug", model=tmp_path)
    assert result.exit_code == 2
    assert "Traceback" in result.stderr and "error: model folder" in result.stderr.splitlines()[-1]
