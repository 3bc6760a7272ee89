"""How `lade generate` and `lade chat` choose tokens: sampling, beams, penalties, stop texts."""

import json

import pytest
import torch
from shell_fixtures import press_ctrl_c
from test_cli_errors import fails

from lade.cli import run as decoding
from lade.cli.options.decoding import Choices
from lade.errors import ConfigError

PROMPT = "say it again, say it"
NEW = 24
CHECKPOINT = {"do_sample": False, "temperature": 1.7, "top_k": 12, "top_p": 0.9, "typical_p": 0.8, "min_p": 0.02}


@pytest.fixture
def generate(report, folder):
    def run(*arguments, path=folder, prompt=PROMPT):
        return report("generate", "-m", path, "-p", prompt, "-n", NEW, *arguments)

    return run


@pytest.fixture
def expected(model, tokenizer):
    """The new tokens of `model.generate`."""

    def run(prompt=PROMPT, seed=None, **arguments):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        if seed is not None:
            torch.manual_seed(seed)
        arguments = {"max_new_tokens": NEW, **arguments}
        return model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)[0, ids.shape[1] :].tolist()

    return run


SAMPLINGS = [
    {"temperature": 0.7},
    {"temperature": 3.0, "top_k": 0},
    {"top_k": 5},
    {"top_p": 0.5, "temperature": 2.0},
    {"min_p": 0.1, "top_k": 100, "temperature": 1.5},
    {"repetition_penalty": 3.0},
]


def flags(arguments):
    return [part for name, value in arguments.items() for part in (f"--{name.replace('_', '-')}", value)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["+".join(sampling) for sampling in SAMPLINGS])
def test_sampling_is_that_of_model_generate_with_the_same_seed(generate, expected, sampling):
    for method in ("auto", "plain", "lookahead"):
        report = generate("--do-sample", "--seed", 11, "--method", method, *flags(sampling))
        assert report["token_ids"] == expected(seed=11, do_sample=True, **sampling)
        assert (report["do_sample"], report["num_beams"], report["seed"]) == (True, 1, 11)


def test_a_temperature_above_0_samples_and_0_does_not(generate, expected):
    report = generate("--temperature", 1.5, "--seed", 11)
    assert report["token_ids"] == expected(seed=11, do_sample=True, temperature=1.5)
    assert report["do_sample"] is True and report["seed"] == 11
    report = generate("--temperature", 0)
    assert report["token_ids"] == expected(do_sample=False) and report["do_sample"] is False


def test_a_seed_that_is_not_given_is_drawn_and_reported(lade, folder, generate):
    first, second = (generate("--do-sample", "--temperature", 3) for _ in range(2))
    assert first["seed"] != second["seed"]
    assert first["token_ids"] != second["token_ids"]
    assert generate("--do-sample", "--temperature", 3, "--seed", first["seed"])["token_ids"] == first["token_ids"]
    assert "· seed 77\n" in lade("generate", "-m", folder, "-p", PROMPT, "-n", 5, "--do-sample", "--seed", 77).stderr
    assert "seed" not in lade("generate", "-m", folder, "-p", PROMPT, "-n", 5).stderr


def test_each_line_of_a_file_can_be_repeated_on_its_own(lade, folder, generate, prompt_lines):
    prompts = ["--prompts", prompt_lines("one", "two")]
    result = lade("generate", "-m", folder, *prompts, "-n", NEW, "--json", "--do-sample", "--top-k", 20)
    for line, prompt in zip(result.stdout.splitlines(), ("one", "two"), strict=True):
        report = json.loads(line)
        again = generate("--do-sample", "--top-k", 20, "--seed", report["seed"], prompt=prompt)
        assert again["token_ids"] == report["token_ids"]


def test_what_is_not_given_comes_from_the_checkpoint(generate, expected, folder, tmp_path, edited, plain, tokenizer):
    copy = edited(folder, tmp_path / "m", generation_config=CHECKPOINT)
    report = generate("--do-sample", "--seed", 1, path=copy)
    assert report["token_ids"] == expected(seed=1, **{**CHECKPOINT, "do_sample": True})
    report = generate("--do-sample", "--seed", 1, "--temperature", 0.8, "--top-k", 0, path=copy)
    wanted = {**CHECKPOINT, "do_sample": True, "temperature": 0.8, "top_k": 0}
    assert report["token_ids"] == expected(seed=1, **wanted)
    assert generate(path=copy)["token_ids"] == plain(tokenizer(PROMPT)["input_ids"], NEW)
    zero = edited(folder, tmp_path / "zero", generation_config={"temperature": 0.0, "do_sample": True})
    report = generate("--do-sample", "--seed", 1, path=zero)
    assert report["token_ids"] == expected(seed=1, do_sample=True, temperature=1.0, top_k=50), "which is none"
    assert generate(path=zero)["token_ids"] == expected(do_sample=False)


def test_a_penalty_works_for_greedy_and_overrides_the_checkpoint(generate, expected, folder, tmp_path, edited):
    copy = edited(folder, tmp_path / "m", generation_config={"repetition_penalty": 5.0})
    for path in (folder, copy):
        report = generate("--repetition-penalty", 1.5, path=path)
        assert report["token_ids"] == expected(do_sample=False, repetition_penalty=1.5)
    assert report["token_ids"] != expected(do_sample=False)


@pytest.mark.parametrize("method", ["auto", "plain", "lookahead"])
def test_a_text_ends_behind_a_stop_text(generate, plain, tokenizer, method):
    text = tokenizer.decode(plain(tokenizer(PROMPT)["input_ids"], NEW))
    stops = [text[8:11], text[14:16]]
    end = min(text.index(stop) + len(stop) for stop in stops)
    report = generate("--method", method, "--stop", stops[0], "--stop", stops[1])
    assert report["text"] == text[:end] and end < NEW
    assert report["new_tokens"] == len(report["token_ids"]) == end


@pytest.mark.one_in(3)
@pytest.mark.parametrize("beams", [2, 3])
@pytest.mark.parametrize("method", ["auto", "plain"])
def test_beams_are_those_of_model_generate(lade, generate, expected, folder, tokenizer, beams, method):
    report = generate("--num-beams", beams, "--method", method)
    wanted = expected(num_beams=beams, do_sample=False)
    assert report["token_ids"] == wanted
    assert (report["do_sample"], report["num_beams"], report["seed"]) == (False, beams, None)
    assert report["new_tokens"] == NEW and 0 < report["steps"] < NEW
    assert report["tokens_per_s"] == pytest.approx((NEW - 1) / report["decode_s"])
    shown = lade("generate", "-m", folder, "-p", PROMPT, "-n", NEW, "--num-beams", beams, "--method", method)
    assert shown.stdout == tokenizer.decode(wanted, skip_special_tokens=True) + "\n"
    assert f"· {beams} beams" in shown.stderr


def test_sampled_beams_and_a_beam_that_ends_early(generate, expected, folder, model, tmp_path, edited):
    report = generate("--num-beams", 3, "--do-sample", "--seed", 9, "--temperature", 2)
    assert report["token_ids"] == expected(seed=9, num_beams=3, do_sample=True, temperature=2.0)
    stop = expected(num_beams=2, do_sample=False)[10]
    fields = {"eos_token_id": stop, "length_penalty": -3.0, "early_stopping": True}
    report = generate("--num-beams", 2, path=edited(folder, tmp_path / "m", generation_config=fields))
    assert report["token_ids"] == expected(num_beams=2, do_sample=False, **fields)
    assert report["new_tokens"] == len(report["token_ids"]) < NEW


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_gives_the_best_beam_so_far_and_a_second_one_nothing(report, folder, monkeypatch, times, tokenizer):
    original, length = decoding.generate, len(tokenizer(PROMPT)["input_ids"]) + 6

    def interrupting(input_ids, scores, **kwargs):
        for _ in range(times if input_ids.shape[1] == length else 0):
            press_ctrl_c()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def generate(*args, stopping_criteria, **kwargs):
        return original(*args, stopping_criteria=[interrupting, *stopping_criteria], **kwargs)

    monkeypatch.setattr(decoding, "generate", generate)
    found = report("generate", "-m", folder, "-p", PROMPT, "-n", NEW, "--num-beams", 2, code=130)
    assert found["interrupted"] is True and found["new_tokens"] == len(found["token_ids"])
    assert found["new_tokens"] == 0 if times == 2 else 1 <= found["new_tokens"] < NEW


@pytest.mark.one_in(2)
@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", -0.5], ["--temperature -0.5", "0 for greedy"]),
        (["--temperature", 0, "--seed", 3], ["--seed 3", "--temperature above 0"]),
        (["--top-k", 0], ["--top-k 0", "--do-sample"]),
        (["--top-p", 0.9], ["--top-p 0.9", "--do-sample"]),
        (["--min-p", 0.1], ["--min-p 0.1", "--do-sample"]),
        (["--seed", 0], ["--seed 0", "--do-sample"]),
        (["--do-sample", "--temperature", 0], ["--temperature 0", "--do-sample"]),
        (["--do-sample", "--top-k", -1], ["--top-k -1", "0 for no limit"]),
        (["--do-sample", "--top-p", 0], ["--top-p 0.0", "> 0 and <= 1"]),
        (["--do-sample", "--top-p", 1.1], ["--top-p 1.1", "> 0 and <= 1"]),
        (["--do-sample", "--min-p", -0.1], ["--min-p -0.1", "from 0 to 1"]),
        (["--do-sample", "--min-p", 1.1], ["--min-p 1.1", "from 0 to 1"]),
        (["--do-sample", "--seed", -1], ["--seed -1", "from 0 to"]),
        (["--do-sample", "--seed", 2**63], ["--seed 9223372036854775808", "from 0 to"]),
        (["--repetition-penalty", 0], ["--repetition-penalty 0.0", "> 0"]),
        (["--num-beams", 0], ["--num-beams 0", ">= 1"]),
        (["--stop", ""], ["--stop", "empty"]),
        (["--stop", "caf\udce9"], ["--stop", "not UTF-8"]),
    ],
)
def test_options_out_of_range_or_without_effect(lade, folder, command, arguments, words):
    prompt = ["-p", PROMPT] if command == "generate" else []
    fails(lade(command, "-m", folder, *prompt, *arguments), *words)


def test_a_stop_text_that_no_tokens_spell(lade, folder, tmp_path, edited):
    copy = edited(folder, tmp_path / "m")
    data = json.loads((copy / "tokenizer.json").read_text())
    data["model"]["vocab"] = {"ab" if token == "h" else token: i for token, i in data["model"]["vocab"].items()}
    (copy / "tokenizer.json").write_text(json.dumps(data))
    for command in (["generate", "-p", "a"], ["chat"]):
        fails(lade(command[0], "-m", copy, *command[1:], "--stop", "h"), "--stop h", "tokenizer")


def test_range_checks_take_what_is_just_in_range():
    settled = Choices(do_sample=True, top_k=0, top_p=1.0, min_p=0.0, seed=2**63 - 1, num_beams=1).settled()
    assert settled.after(1).seed == 0
    assert Choices().settled() == Choices().after(3) == Choices()
    with pytest.raises(ConfigError):
        Choices(num_beams=-1).settled()


def test_a_chat_stops_and_penalises_and_has_no_beams(lade, folder, generate):
    flags = ["--stop", "a", "--stop", "e", "--repetition-penalty", 1.3]
    result = lade("chat", "-m", folder, "-n", NEW, *flags, stdin="hello\n")
    assert result.stdout == generate(*flags, prompt="hello")["text"] + "\n"
    fails(lade("chat", "-m", folder, "--num-beams", 2), "--num-beams 2", "lade generate")
    assert lade("chat", "-m", folder, "--num-beams", 1, stdin="").exit_code == 0
