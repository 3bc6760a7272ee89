import json
import signal

import pytest
from shell_fixtures import CONTEXT, press_ctrl_c

from lade import native

PROMPT = "say it again, say it"
FIELDS = [
    "text", "token_ids", "new_tokens", "steps", "tokens_per_step", "step_tokens_mean", "prefill_s", "decode_s",
    "tokens_per_s", "predicted_tokens", "model", "dtype", "packed", "weights", "invariant", "config", "do_sample",
    "num_beams", "seed", "interrupted", "finish_reason",
]  # fmt: skip
SIZES = ["--window", 4, "--ngram", 3, "--guesses", 3]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "arguments",
    [
        [], ["--method", "plain"], ["--method", "adaptive"], ["--method", "lookahead"], ["--budget", 6],
        ["--guesses", 0], SIZES,
    ],
)  # fmt: skip
def test_json_has_the_tokens_of_plain_generate(lade, folder, plain, tokenizer, arguments):
    result = lade("generate", "--model", folder, "--prompt", PROMPT, "--max-new-tokens", 40, "--json", *arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    (line,) = result.stdout.splitlines()
    report = json.loads(line)
    assert list(report) == FIELDS
    assert report["token_ids"] == plain(tokenizer(PROMPT)["input_ids"], 40)
    assert report["text"] == tokenizer.decode(report["token_ids"], skip_special_tokens=True)
    assert report["new_tokens"] == 40
    assert report["tokens_per_step"] == pytest.approx(39 / report["steps"])
    assert report["tokens_per_s"] == pytest.approx(39 / report["decode_s"])
    assert (report["model"], report["dtype"], report["interrupted"]) == (str(folder), "float32", False)
    assert (report["do_sample"], report["num_beams"], report["seed"]) == (False, 1, None)
    if "plain" in arguments:
        assert report["config"] is None and report["steps"] == 39 and report["step_tokens_mean"] == 1
    elif arguments and "adaptive" not in arguments:  # else it weighs what passes take
        assert report["steps"] < 39 and report["step_tokens_mean"] > 1
    if arguments == SIZES:
        assert [report["config"][name] for name in ("window", "ngram", "guesses")] == [4, 3, 3]
    if "adaptive" in arguments or "--budget" in arguments:
        assert report["config"]["adaptive"] is True
    if "--budget" in arguments:
        assert report["config"]["budget"] == 6 and report["step_tokens_mean"] <= 6
    one = json.loads(lade("generate", "-m", folder, "-p", PROMPT, "-n", 1, "--json", *arguments).stdout)
    assert (one["new_tokens"], one["steps"]) == (1, 0)
    assert one["tokens_per_s"] is None and one["step_tokens_mean"] is None, "it has no speed"


def test_end_of_sequence_is_among_the_ids_and_not_in_the_text(lade, folder, plain, tokenizer, tmp_path, edited):
    ids = plain(tokenizer(PROMPT)["input_ids"], 30)
    stop = next(token for token in ids if token != ids[0])
    copy = edited(folder, tmp_path / "m", generation_config={"eos_token_id": [stop, 0]})
    report = json.loads(lade("generate", "-m", copy, "-p", PROMPT, "-n", 30, "--json").stdout)
    assert report["token_ids"] == ids[: ids.index(stop) + 1]
    copy = edited(folder, tmp_path / "special", tokenizer_config={"eos_token": tokenizer.convert_ids_to_tokens(stop)})
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": stop, "pad_token_id": 0}))
    report = json.loads(lade("generate", "-m", copy, "-p", PROMPT, "-n", 30, "--json").stdout)
    assert report["token_ids"][-1] == stop
    assert report["text"] == tokenizer.decode(report["token_ids"][:-1])


def test_a_checkpoint_that_wants_to_sample_is_decoded_greedily_without_a_word(
    lade, folder, plain, tokenizer, tmp_path, edited
):
    wishes = {"do_sample": True, "num_beams": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    copy = edited(folder, tmp_path / "m", generation_config={**wishes, "max_length": 7, "early_stopping": True})
    result = lade("generate", "-m", copy, "-p", PROMPT, "-n", 20, "--json", "--method", "lookahead", "--debug")
    assert json.loads(result.stdout)["token_ids"] == plain(tokenizer(PROMPT)["input_ids"], 20)
    assert not any(word in result.stderr for word in [*wishes, "max_length"])


def test_jsonl_gives_an_object_a_line_and_other_files_are_one_prompt_as_they_are(
    lade, folder, plain, tokenizer, tmp_path
):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one two"}\n\n{"prompt": "three é", "id": 3}\n')
    lines = lade("generate", "-m", folder, "--prompts", file, "-n", 12, "--json").stdout.splitlines()
    texts = ["one two", "three é"]
    assert [json.loads(line)["token_ids"] for line in lines] == [plain(tokenizer(t)["input_ids"], 12) for t in texts]
    result = lade("generate", "-m", folder, "--prompts", file, "-n", 12)
    assert result.stdout == "\n\n".join(json.loads(line)["text"] for line in lines) + "\n"
    other = tmp_path / "prompt.json"
    other.write_text("two\nlines\n")
    report = json.loads(lade("generate", "-m", folder, "--prompts", other, "-n", 12, "--json").stdout)
    assert report["token_ids"] == plain(tokenizer("two\nlines\n")["input_ids"], 12)


def test_auto_decodes_plainly_what_it_cannot_serve_and_says_so_in_one_line(lade, unsupported, prompt_lines):
    result = lade("generate", "-m", unsupported, "--prompts", prompt_lines("one", "two"), "-n", 12, "--json")
    assert result.exit_code == 0
    (warning,) = result.stderr.splitlines()
    assert warning.startswith("GPTNeoForCausalLM is not supported, running at normal speed: its local attention")
    assert all(json.loads(line)["config"] is None for line in result.stdout.splitlines())


def test_a_generation_beyond_the_context_is_warned_of(lade, folder, plain, tokenizer):
    prompt = "x" * (CONTEXT - 4)
    result = lade("generate", "-m", folder, "-p", prompt, "-n", 12, "--json")
    assert f"context of {CONTEXT}" in result.stderr and len(result.stderr.splitlines()) == 1
    assert json.loads(result.stdout)["new_tokens"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "lookahead"])
def test_ctrl_c_gives_what_there_is(lade, report, folder, plain, tokenizer, method, at_step):
    at_step(5, press_ctrl_c)
    before = signal.getsignal(signal.SIGINT)
    command = ["generate", "-m", folder, "-p", PROMPT, "-n", 100, "--method", method]
    found = report(*command, code=130)
    assert found["interrupted"] is True
    assert 6 <= found["new_tokens"] < 100 and found["steps"] == 5
    assert found["token_ids"] == plain(tokenizer(PROMPT)["input_ids"], 100)[: found["new_tokens"]]
    result = lade(*command)
    assert (result.exit_code, result.stdout) == (130, found["text"] + "\n")
    assert "interrupted" in result.stderr and "1 + 5 passes" in result.stderr
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_does_not_wait_for_the_step(report, folder, at_step):
    at_step(1, lambda: (press_ctrl_c(), press_ctrl_c()))
    assert report("generate", "-m", folder, "-p", PROMPT, "-n", 100, code=130)["new_tokens"] == 1


def test_a_prediction_is_drafted_from(report, folder, plain, tokenizer, tmp_path):
    answer, expected = plain(tokenizer(PROMPT)["input_ids"], 40), tmp_path / "expected.txt"
    expected.write_text(tokenizer.decode(answer), encoding="utf-8")
    given = ["--prediction-file", expected, "--budget", 16, "--max-new-tokens", 40]
    found = report("generate", "--model", folder, "--prompt", PROMPT, *given)
    assert found["token_ids"] == answer
    assert found["predicted_tokens"] > 20 and found["tokens_per_step"] > 5


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--method", "plain"], "--method plain"),
        (["--num-beams", 2], "--num-beams"),
        (["--prediction-file", "nowhere.txt"], "prediction file 'nowhere.txt' cannot be read"),
    ],
)
def test_a_prediction_without_use_is_refused(lade, folder, tmp_path, more, says):
    expected = tmp_path / "expected.txt"
    expected.write_text("a text")
    result = lade("generate", "--model", folder, "--prompt", PROMPT, "--prediction-file", expected, *more)
    assert result.exit_code == 2 and says in result.stderr


@pytest.mark.parametrize("many", [False, True])
def test_of_16_bits_one_quiet_line_is_said(lade, folder, prompt_lines, many):
    prompts = ["--prompts", prompt_lines(PROMPT, "another")] if many else ["-p", PROMPT]
    ask = ["generate", "-m", folder, "--max-new-tokens", 4, *prompts]
    line = "bfloat16: where two tokens score almost equally the output may differ from plain decoding; "
    remedy = "--invariant" if native.library() else "--dtype float32"  # without compiled kernels nothing is invariant
    said = lade(*ask, "--dtype", "bfloat16", "--no-invariant").stderr
    assert said.splitlines().count(f"{line}{remedy} prevents it") == 1 and "PrecisionWarning" not in said
    for more in (["--dtype", "bfloat16", "--quiet"], ["--dtype", "bfloat16", "--method", "plain"], ["--dtype", "fp32"]):
        assert "almost equally" not in lade(*ask, *more).stderr
