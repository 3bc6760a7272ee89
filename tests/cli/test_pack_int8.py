"""`lade pack`, and `--weights` int8 and int4."""

import pytest
from spies import failing

from lade.backends.cpu.packing import integers

pytestmark = pytest.mark.usefixtures("rounds_alike")

PROMPT = "say it again, say it"


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("it was said again and again, " * 5)
    return file


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_what_integers_cost_is_told_and_the_model_saved_and_loaded(
    lade, report, folder, text, tmp_path, small_layers_count, weights
):
    saved, given = tmp_path / weights, [] if weights == "int8" else ["--weights", weights]
    facts = report("pack", folder, "--check", text, "--keep", "lm_head", "--save", saved, *given)
    assert facts[f"{weights}_layers"] == 14 == len(facts["errors"]) and facts["kept_layers"] == ["lm_head"]
    assert facts["perplexity_after"] != facts["perplexity_before"] > 1 and facts["tokens"] == len(text.read_text())
    assert facts["bytes_after"] < facts["bytes_before"]
    shown = lade("pack", "-m", folder, "--check", text, *given).stdout
    assert "perplexity" in shown and f"layers in {weights}: " in shown and "down_proj" in shown
    for which in (["-m", saved], ["-m", folder, "--weights", weights, "--dtype", "float32"]):
        assert len(report("generate", *which, "-p", PROMPT, "-n", 8, "--method", "plain")["token_ids"]) == 8
    facts = report("info", "-m", saved)
    assert (facts["weights"], facts["supported"]) == (weights, False)
    other = "int4" if weights == "int8" else "int8"
    assert f"the model is packed in {weights}" in lade("info", "-m", saved, "--weights", other).stderr
    assert "--dtype bf16" in lade("generate", "-m", saved, "--dtype", "bf16", "-p", PROMPT).stderr
    assert "is packed already" in lade("pack", saved, "--check", text).stderr


@pytest.mark.parametrize(
    ("weights", "command"),
    [
        ("int4", ["doctor", "--seconds", "0.1"]),
        ("int8", ["warm", "--prompts", "text.txt", "--out", "memory", "-n", 4]),
        ("int8", ["generate", "-p", PROMPT, "-n", 4]),
        ("int4", ["generate", "-p", PROMPT, "-n", 4]),
    ],
)
def test_a_model_in_integers_goes_through_every_command(
    report, folder, tmp_path, monkeypatch, command, small_layers_count, weights
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(PROMPT)
    facts = report(*command, "-m", folder, "--dtype", "bfloat16", "--weights", weights, "--invariant")
    facts = facts["model"] if command[0] == "doctor" else facts
    assert (facts["weights"], facts["invariant"], facts["dtype"]) == (weights, True, "bfloat16")
    assert facts["packed_layers" if command[0] == "doctor" else "packed"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pack"], "nothing to do: give --check FILE"),
        (["pack", "--check", "no-such"], "no-such"),
        (["pack", "--save", "x", "--keep", "lm_hed"], "no linear layer matches it"),
        (["pack", "--save", "x", "--tokens", "1"], "--tokens 1"),
        (["serve", "--weights", "int8", "--no-pack"], "--no-pack"),
        (["generate", "--weights", "int3", "-p", PROMPT], "--weights int3: give one of int8, int4"),
        (["generate", "--weights", "int8", "--no-pack", "-p", PROMPT], "--no-pack"),
        (["generate", "--weights", "int8", "--quantization", "bnb-8bit", "-p", PROMPT], "--quantization bnb-8bit"),
    ],
    ids=range(8),
)
def test_what_is_wrong_is_said(lade, folder, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = lade(*arguments, "-m", folder)
    assert result.exit_code == 2 and words in result.stderr and not (tmp_path / "x").exists()


def test_what_would_be_wrong_at_the_end_is_said_before_the_text_is_read(
    lade, folder, text, tmp_path, monkeypatch, request
):
    failing(monkeypatch, integers, "perplexity", AssertionError("the text is read"))
    assert "nothing to round" in lade("pack", folder, "--check", text).stderr
    request.getfixturevalue("small_layers_count")
    for folder_name, name in (("other", "model.safetensors"), ("older", "pytorch_model.bin")):
        (tmp_path / folder_name).mkdir()
        (tmp_path / folder_name / name).write_text("x")
    (tmp_path / "letter.txt").write_text("x")
    wrong = {
        "other' holds another model": ["--save", tmp_path / "other"],
        "older' holds another model": ["--save", tmp_path / "older"],
        "is not a folder": ["--save", text],
        f"'{text}' is not writable": ["--save", text / "folder"],
        "has 1 token: give a longer one": ["--check", tmp_path / "letter.txt"],
    }
    for says, arguments in wrong.items():
        result = lade("pack", folder, "--check", text, *arguments)
        assert result.exit_code == 2 and says in result.stderr, result.stderr
    result = lade("pack", folder, "--check", text, "--keep", "*", "--save", tmp_path / "new")
    assert result.exit_code == 2 and "--keep '*': no layer is left to round" in result.stderr
    assert not (tmp_path / "new").exists()


def test_a_long_list_of_kept_layers_is_cut_short_and_small_models_have_their_tenths(
    lade, report, folder, text, small_layers_count
):
    command = ["pack", folder, "--check", text, "--keep", "layers.*"]
    shown = " ".join(lade(*command).stdout.split())
    assert "model.layers.1.self_attn.q_proj and 6 more 140.2 kB -> 125.8 kB" in shown, shown
    assert len(report(*command)["kept_layers"]) == 14
