"""`lade generate --batch-size`: the same answers, in order, in a file that survives whatever ends the run."""

import json
import signal
import threading
from concurrent.futures import CancelledError, Future

import pytest
from test_cli_errors import fails
from test_cli_generate import FIELDS
from typer.testing import CliRunner

from lade.cli.batch import prompt_job, runner
from lade.cli.batch.files import ResultFile
from lade.cli.batch.prompt_job import PromptJob
from lade.cli.batch.runner import completed
from lade.cli.main import app
from lade.serving import batch as serving_batch
from lade.serving import engine as serving_engine
from lade.serving.engine import Engine

CONTEXT = 512  # of the model in conftest.py
NEW = 12
TEXTS = ["say it again, say it", "one", "two three four five six", "é", "one two one two one", "a b", "seven"]
LINES = [1, 2, 4, 5, 6, 7, 8]  # the third is empty
TIMES = ("steps", "tokens_per_step", "step_tokens_mean", "prefill_s", "decode_s", "tokens_per_s")
METHODS = [
    [],
    ["--method", "plain"],
    ["--method", "lookahead"],
    ["--window", 4, "--ngram", 3, "--guesses", 3],
    ["--budget", 8],
]
SAMPLED = ["--do-sample", "--seed", 11, "--temperature", 1.5, "--top-k", 20]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(runner, "POLL_S", 0.001)


@pytest.fixture
def prompts(tmp_path):
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in TEXTS]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join([*lines[:2], "", *lines[2:]]) + "\n", encoding="utf-8")
    return file


@pytest.fixture
def out(tmp_path):
    return tmp_path / "answers.jsonl"


@pytest.fixture
def generate(lade, folder, prompts):
    """`lade generate` of the prompts, two at a time."""

    def run(*arguments, model=folder, prompts=prompts, size=2, new=NEW):
        own = ["-m", model, "--prompts", prompts, "--batch-size", size, "-n", new]
        return lade("generate", *own, *arguments)

    return run


@pytest.fixture
def whole(generate, tmp_path):
    """The file of a run in one go."""
    file = tmp_path / "whole.jsonl"
    assert generate("--out", file).exit_code == 0
    return file


def read(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def timeless(entries):
    """All that does not depend on the clock, or on who decodes beside."""
    return [{name: value for name, value in entry.items() if name not in TIMES} for entry in entries]


# The answers


@pytest.mark.one_in(10)
@pytest.mark.parametrize("sampling", [[], [*SAMPLED, "--repetition-penalty", 1.5, "--stop", "ab"]], ids=["", "drawn"])
@pytest.mark.parametrize("method", METHODS, ids=lambda arguments: "-".join(map(str, arguments)) or "auto")
def test_answers_are_those_without_batches(lade, generate, folder, prompts, method, sampling):
    alone = lade("generate", "-m", folder, "--prompts", prompts, "-n", NEW, "--json", *method, *sampling)
    expected = [json.loads(line) for line in alone.stdout.splitlines()]
    for size in (1, 2, 5):
        result = generate("--json", *method, *sampling, size=size)
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        entries = [json.loads(line) for line in result.stdout.splitlines()]
        assert [(entry["line"], entry["prompt"]) for entry in entries] == list(zip(LINES, TEXTS, strict=True))
        for entry, alike in zip(timeless(entries), timeless(expected), strict=True):
            assert {name: entry[name] for name in alike} == alike
        if method and not sampling:  # what auto drafts depends on the clock
            assert (max(entry["tokens_per_step"] for entry in entries) > 1) == ("plain" not in method)


def test_a_prompt_may_contain_the_padding_token(lade, generate, folder, prompts, tokenizer, tmp_path, edited):
    padding = tokenizer("o")["input_ids"][0]
    copy = edited(folder, tmp_path / "m", generation_config={"pad_token_id": padding, "eos_token_id": 0})
    alone = lade("generate", "-m", copy, "--prompts", prompts, "-n", NEW, "--json").stdout.splitlines()
    together = generate(model=copy).stdout.splitlines()
    assert [json.loads(line)["token_ids"] for line in together] == [json.loads(line)["token_ids"] for line in alone]


def test_a_table_of_positions_ends_the_texts(lade, generate, with_position_table, prompts):
    result = generate(model=with_position_table)
    assert result.exit_code == 0 and "warning" in result.stderr, result.output
    alone = lade("generate", "-m", with_position_table, "--prompts", prompts, "-n", NEW, "--json").stdout.splitlines()
    together = [json.loads(line)["token_ids"] for line in result.stdout.splitlines()]
    assert together == [json.loads(line)["token_ids"] for line in alone]
    assert min(map(len, together)) < NEW


@pytest.mark.slow
def test_a_memory_serves_all_prompts(lade, generate, folder, prompts, whole, tmp_path):
    memory = tmp_path / "texts.memory"
    assert lade("warm", "-m", folder, "--prompts", prompts, "--out", memory, "-n", NEW).exit_code == 0
    entries = [json.loads(line) for line in generate("--memory", memory, "--budget", 8).stdout.splitlines()]
    assert [entry["token_ids"] for entry in entries] == [entry["token_ids"] for entry in read(whole)]
    assert all(entry["config"]["memory"] and entry["tokens_per_step"] > 2 for entry in entries)


def test_a_line_says_what_it_was_made_from(generate, folder):
    entry = json.loads(generate("--top-p", 0.9, "--do-sample", "--seed", 3, "--stop", "ab").stdout.splitlines()[2])
    assert list(entry) == ["line", "prompt", *FIELDS, "settings"]
    assert (entry["line"], entry["prompt"], entry["model"], entry["seed"]) == (4, TEXTS[2], str(folder), 3)
    assert entry["settings"] == {
        "method": "adaptive", "max_new_tokens": NEW, "temperature": None, "top_k": None, "top_p": 0.9, "min_p": None,
        "repetition_penalty": None, "stop": ["ab"],
    }  # fmt: skip
    assert entry["new_tokens"] == len(entry["token_ids"]) and entry["decode_s"] > 0 and entry["prefill_s"] > 0
    assert entry["steps"] * entry["tokens_per_step"] == pytest.approx(entry["new_tokens"] - 1)


def test_a_file_gets_the_lines_and_the_terminal_a_summary(generate, out):
    result = generate("--out", out)
    assert (result.exit_code, result.stdout) == (0, "")
    (summary,) = result.stderr.splitlines()
    assert f"{NEW * len(TEXTS)} tokens in " in summary and "tokens per step" in summary
    assert f"{str(out)!r} has {len(TEXTS)} prompts" in summary
    assert timeless(read(out)) == timeless(map(json.loads, generate().stdout.splitlines()))
    out.unlink()
    assert generate("--out", out, "--json").stderr == ""


# Going on


@pytest.mark.one_in(6)
@pytest.mark.parametrize("lines", [0, 0.01, 0.5, 1, 2.02, 4.99, 6, 7])
def test_a_run_goes_on_where_it_was_ended(generate, whole, out, lines):
    complete = whole.read_bytes().splitlines(keepends=True)
    kept, line = b"".join(complete[: int(lines)]), [*complete, b""][int(lines)]
    torn = line[: int(lines % 1 * len(line))]
    out.write_bytes(kept + torn)
    result = generate("--out", out, "--resume", size=5)
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(kept), "lines that are there stay as they are"
    assert timeless(read(out)) == timeless(read(whole))
    said = f"continuing after {int(lines)} of 7 prompts" if lines < 7 else f"{str(out)!r} is complete: 7 prompts"
    assert (said in result.stderr) == (lines >= 1)


def test_a_run_may_begin_with_resume(generate, whole, out):
    assert generate("--out", out, "--resume").exit_code == 0
    assert timeless(read(out)) == timeless(read(whole))


def test_a_seed_that_was_drawn_is_kept(generate, out):
    assert generate("--out", out, "--do-sample").exit_code == 0
    entries = read(out)
    out.write_bytes(out.read_bytes()[:2500])
    assert generate("--out", out, "--do-sample", "--resume").exit_code == 0
    assert timeless(read(out)) == timeless(entries)


def test_prompts_that_have_come_behind_are_answered(generate, prompts, out):
    assert generate("--out", out).exit_code == 0
    with prompts.open("a") as file:
        file.write('{"prompt": "new"}\n')
    assert generate("--out", out, "--resume").exit_code == 0
    assert [entry["line"] for entry in read(out)] == [*LINES, 9]


def test_lines_are_not_written_over(generate, whole):
    before = whole.read_bytes()
    fails(generate("--out", whole), whole.name, "--resume", "another --out")
    assert whole.read_bytes() == before


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", NEW + 1], ["settings.max_new_tokens is 13 here, but 12 in line 1"]),
        (["--method", "plain"], ['settings.method is "plain" here, but "adaptive"']),
        (["--window", 3], ['settings.method is "lookahead" here, but "adaptive"']),
        (["--budget", 4], ["config.budget is 4 here, but null"]),
        (["--do-sample"], ["do_sample is true here, but false"]),
        (["--repetition-penalty", 1.2], ["settings.repetition_penalty is 1.2 here, but null"]),
        (["--stop", "x"], ['settings.stop is ["x"] here, but null']),
        (["--dtype", "float64"], ['dtype is "float64" here, but "float32"']),
    ],
)
def test_other_options_are_refused(generate, whole, arguments, words):
    before = whole.read_bytes()[:-5]
    whole.write_bytes(before)
    fails(generate("--out", whole, "--resume", *arguments), *words, whole.name, "another --out")
    assert whole.read_bytes() == before


def test_other_draws_are_refused(generate, out):
    sampled = ["--out", out, "--do-sample", "--resume"]
    assert generate(*sampled, "--seed", 3).exit_code == 0
    fails(generate(*sampled, "--seed", 4), "seed is 4 here, but 3")
    fails(generate(*sampled, "--top-k", 4), "settings.top_k is 4 here, but null")


def test_another_model_is_refused(generate, whole, folder, tmp_path, edited):
    result = generate("--out", whole, "--resume", model=edited(folder, tmp_path / "other"))
    fails(result, "model is ", "other", "here, but", "llama")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text.replace("six", "6"), ['prompt is "two three four five 6"', "here, but", "line 3 of"]),
        (lambda text: text.replace("\n\n", "\n"), ["line is 3 here, but 4 in line 3 of"]),
        (lambda text: "\n".join(text.split("\n")[:3]), ["has 7 lines for 2 prompts"]),
    ],
)
def test_other_prompts_are_refused(generate, whole, prompts, edit, words):
    before = whole.read_bytes()
    prompts.write_text(edit(prompts.read_text()))
    fails(generate("--out", whole, "--resume"), *words, whole.name, "another --out")
    assert whole.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": "say it again, say it"}\n', ["line is 1 here, but null in line 1"]),
        ('{"prompt": "say it again, say it"}', ["ends with something other"]),
        ('{"line": 1, "prompt": "say it too', ["ends with something other"]),
        ("some text", ["ends with something other"]),
        ("some text\n", ["damaged at line 1"]),
        ("[1]\n", ["damaged at line 1"]),
    ],
)
def test_what_this_command_has_not_written_stays_as_it_is(generate, out, content, words):
    out.write_text(content)
    fails(generate("--out", out, "--resume"), out.name, *words, "another --out")
    assert out.read_text() == content


def test_the_prompts_themselves_are_not_written_over(generate, prompts):
    before = prompts.read_bytes()
    fails(generate("--out", prompts, "--resume"), prompts.name, "another --out")
    prompts.write_bytes(before.replace(b"\n", b"")[:20])
    fails(generate("--out", prompts), "JSON")
    assert prompts.read_bytes() == before.replace(b"\n", b"")[:20]


# Shards


def test_shards_are_disjoint_and_together_the_whole(generate, whole, tmp_path):
    lines = []
    for number in (1, 2, 3):
        file = tmp_path / f"{number}.jsonl"
        assert generate("--out", file, "--shard", f"{number}/3").exit_code == 0
        lines += read(file)
    assert timeless(sorted(lines, key=lambda entry: entry["line"])) == timeless(read(whole))
    assert [entry["line"] for entry in read(tmp_path / "2.jsonl")] == LINES[1::3]


def test_a_shard_goes_on_where_it_was_ended_also_when_prompts_have_come_behind(generate, prompts, out):
    shard = ("--out", out, "--resume", "--shard", "2/3")
    assert generate(*shard).exit_code == 0
    complete = read(out)
    out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])
    with prompts.open("a") as file:
        file.write('{"prompt": "a"}\n{"prompt": "b"}\n')
    result = generate(*shard)
    assert result.exit_code == 0 and "continuing after 1 of 3 prompts" in result.stderr
    assert timeless(read(out)[:2]) == timeless(complete) and read(out)[2]["prompt"] == "a"
    fails(generate("--out", out, "--resume", "--shard", "1/3"), "line is 1 here, but 2", "another --out")


def test_a_shard_without_prompts_is_done_at_once(generate, out):
    result = generate("--out", out, "--shard", "9/9", model="no-model")
    assert result.exit_code == 0 and out.read_bytes() == b""


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3"])
def test_shards_that_are_none(generate, text):
    fails(generate("--shard", text, model="no-model"), "shard", "I/N")


# What ends a run


@pytest.fixture
def interrupting(monkeypatch):
    """Presses Ctrl-C when an answer is there, counted from 1, before its line is written."""
    entry = PromptJob.entry

    def at(answer, times=1):
        left = [answer]

        def interrupted(self, line, handle):
            left[0] -= 1
            for _ in range(times if left[0] == 0 else 0):
                signal.raise_signal(signal.SIGINT)
            return entry(self, line, handle)

        monkeypatch.setattr(PromptJob, "entry", interrupted)

    return at


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_keeps_the_lines_and_says_how_to_go_on(generate, whole, out, interrupting, times):
    before = signal.getsignal(signal.SIGINT)
    interrupting(2, times)
    result = generate("--out", out)
    assert result.exit_code == 130 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    done = len(read(out))
    assert done == 1 if times == 2 else 2 <= done < 7, "the second one waits for nothing"
    assert line == f"interrupted: {done} of 7 prompts are in {str(out)!r}; the same command with --resume continues"
    assert timeless(read(out)) == timeless(read(whole))[:done]
    assert signal.getsignal(signal.SIGINT) is before
    assert generate("--out", out, "--resume").exit_code == 0
    assert timeless(read(out)) == timeless(read(whole))


def test_ctrl_c_without_a_file(generate, interrupting):
    interrupting(1)
    result = generate("--json")
    assert result.exit_code == 130
    done = len(result.stdout.splitlines())
    assert 1 <= done < 7
    assert f"interrupted: {done} of 7 prompts are written; with --out FILE" in result.stderr


@pytest.fixture
def failing(monkeypatch):
    """Has the requests for some lines fail after their third step."""
    add, state = Engine.add, {"lines": ()}

    def adding(self, input_ids, **arguments):
        line = dict(zip(TEXTS, LINES, strict=True))[state["text"]]

        def on_step(step):
            if step.index == 2 and line in state["lines"]:
                raise RuntimeError("no\nluck")

        return add(self, input_ids, on_step=on_step, **arguments)

    submit = PromptJob.submit

    def submitting(self, line):
        state["text"] = self._batch.prompts[line].text
        return submit(self, line)

    monkeypatch.setattr(Engine, "add", adding)
    monkeypatch.setattr(PromptJob, "submit", submitting)
    return lambda *lines: state.update(lines=lines)


def test_a_request_that_fails_does_not_take_the_others_with_it(generate, whole, prompts, out, failing):
    failing(2, 6)
    result = generate("--out", out)
    assert result.exit_code == 1
    entries = read(out)
    assert [entry["line"] for entry in entries] == LINES
    assert [entry["line"] for entry in entries if "error" in entry] == [2, 6]
    error = {"line": 2, "prompt": "one", "error": "RuntimeError: no luck"}
    assert {name: entries[1][name] for name in error} == error and "token_ids" not in entries[1]
    good = [entry for entry in timeless(read(whole)) if entry["line"] not in (2, 6)]
    assert [entry for entry in timeless(entries) if "error" not in entry] == good
    lines = result.stderr.splitlines()
    assert lines[0] == f"failed: {str(prompts)!r} line 2: RuntimeError: no luck"
    assert lines[-1] == "2 of 7 prompts failed; the same command with --resume retries them"
    assert "failed" in generate().stderr and "--resume" not in generate().stderr


def test_prompts_that_failed_are_tried_again_in_their_places(generate, whole, out, failing):
    failing(2, 6)
    assert generate("--out", out).exit_code == 1
    out.write_bytes(b"".join(out.read_bytes().splitlines(keepends=True)[:6]))
    failing(6)
    result = generate("--out", out, "--resume")
    assert result.exit_code == 1 and "continuing after 4 of 7 prompts" in result.stderr
    assert "1 of 7 prompts failed" in result.stderr
    assert [entry["line"] for entry in read(out) if "error" in entry] == [6]
    failing()
    result = generate("--out", out, "--resume")
    assert result.exit_code == 0 and "continuing after 6 of 7 prompts" in result.stderr
    assert timeless(read(out)) == timeless(read(whole))
    assert list(out.parent.glob("*.partial")) == []


def test_ctrl_c_while_prompts_are_tried_again_loses_no_line(generate, whole, out, failing, interrupting):
    failing(1, 2, 4, 5, 6, 8)
    generate("--out", out)
    failing()
    interrupting(1)
    result = generate("--out", out, "--resume")
    assert result.exit_code == 130
    entries = read(out)
    assert [entry["line"] for entry in entries] == LINES and "error" not in entries[0] and "error" in entries[-1]
    done = sum("error" not in entry for entry in entries)
    assert f"interrupted: {done} of 7 prompts" in result.stderr
    assert generate("--out", out, "--resume").exit_code == 0
    assert timeless(read(out)) == timeless(read(whole))


def test_an_engine_that_breaks_down_ends_the_run(generate, prompts, out, monkeypatch):
    """What it has begun has an error for an answer, and the run can be continued."""
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS * 3))
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    forget = serving_engine.Scheduler._forget_ended

    def breaking(self):
        forget(self)
        if self._running and out.exists() and out.read_bytes().count(b"\n") >= 2:
            raise MemoryError("all is lost")

    with monkeypatch.context() as patch:
        patch.setattr(serving_engine.Scheduler, "_forget_ended", breaking)
        result = generate("--out", out)
    assert result.exit_code == 2 and "MemoryError: all is lost" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert generate("--out", out, "--resume").exit_code == 0
    assert timeless(read(out)) == timeless(map(json.loads, generate(size=5).stdout.splitlines()))


def test_a_disk_that_is_full(generate, out, monkeypatch):
    append = ResultFile.append

    def appending(self, line):
        if line["line"] == 4:
            self.path = self.path / "none"
        append(self, line)

    monkeypatch.setattr(ResultFile, "append", appending)
    fails(generate("--out", out), "--resume")
    assert len(read(out)) == 2


# Before any work


@pytest.fixture
def no_engine(monkeypatch):
    def none(*args, **kwargs):
        raise AssertionError("too late")

    monkeypatch.setattr(prompt_job, "Engine", none)


def test_a_prompt_that_is_too_long(generate, prompts, out, no_engine):
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "x" * CONTEXT}) + "\n")
    fails(generate("--out", out), f"{str(prompts)!r} line 9", CONTEXT, "shorten")
    assert not out.exists()


def test_a_prompt_that_is_too_long_for_the_engine(generate, prompts, out, monkeypatch):
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "x" * 200}) + '\n{"prompt": "short"}\n')
    monkeypatch.setattr(serving_batch, "default_max_tokens", lambda token_bytes: 200)
    fails(generate("--out", out), f"{str(prompts)!r} line 9", "212 tokens of prompt and answer")
    assert not out.exists()


@pytest.mark.parametrize("method", ["auto", "plain"])
def test_a_model_that_cannot_be_served_in_a_batch(generate, unsupported, out, method):
    result = generate("--out", out, "--method", method, model=unsupported)
    fails(result, "GPTNeoForCausalLM", "leave out --batch-size")
    assert not out.exists()
    assert "leave out --batch-size" not in generate("--method", "lookahead", model=unsupported).stderr


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "PROMPTS", "--batch-size", 0], ["--batch-size 0", "from 1"]),
        (["--prompts", "PROMPTS", "--batch-size", 2, "--num-beams", 2], ["--num-beams 2", "--batch-size"]),
        (["--prompts", "PROMPTS", "--batch-size", 2, "--num-beams", 0], ["--num-beams 0", ">= 1"]),
        (["--prompts", "PROMPTS", "--batch-size", 2, "--resume"], ["--resume", "--out FILE"]),
        (["--prompts", "PROMPTS", "--batch-size", 2, "--out", "none/o.jsonl"], ["--out none"]),
        (["--prompts", "PROMPTS", "--batch-size", 2, "--out", "."], ["--out ."]),
        (["--prompts", "PROMPTS", "--batch-size", 2, "-p", "x"], ["--prompts"]),
        (["--prompts", "PROMPTS", "--batch-size", 2, "-n", 0], ["--max-new-tokens 0"]),
        (["--prompts", "PROMPTS", "--out", "o.jsonl"], ["--out", "--batch-size"]),
        (["--prompts", "PROMPTS", "--resume"], ["--resume", "--batch-size"]),
        (["--prompts", "PROMPTS", "--shard", "1/2"], ["--shard", "--batch-size"]),
        (["--prompts", "prompts.txt", "--batch-size", 2], ["--batch-size 2", ".jsonl"]),
        (["-p", "x", "--batch-size", 2], ["--batch-size 2", "--prompts FILE.jsonl"]),
        (["-", "--batch-size", 2], ["--batch-size 2", "--prompts FILE.jsonl"]),
        (["--batch-size", 2], ["--batch-size 2", "--prompts FILE.jsonl"]),
        (["--prompts", "none.jsonl", "--batch-size", 2], ["none.jsonl"]),
    ],
)
def test_options_that_do_not_go_together(lade, prompts, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    arguments = [prompts if each == "PROMPTS" else each for each in arguments]
    fails(lade("generate", "-m", "no-model", *arguments), *words)
    assert [file.name for file in tmp_path.iterdir()] == [prompts.name]


# How the engine is used


class Fake:
    """A handle that ends when it is told to."""

    def __init__(self):
        self.future = Future()

    def done(self):
        return self.future.done()

    def cancel(self):
        return self.future.cancel()


@pytest.fixture
def fakes(monkeypatch):
    """Handles by line; each poll lets the next one of `ends` end."""
    handles, ends = {}, []
    monkeypatch.setattr(runner, "sleep", lambda seconds: handles[ends.pop(0)].future.set_result(None))

    def begin(line):
        handles[line] = Fake()
        return handles[line]

    return begin, handles, ends


def test_those_that_end_early_make_room_and_wait_for_their_turn(fakes):
    begin, handles, ends = fakes
    ends += [2, 3, 1, 4, 5]
    requests = completed([1, 2, 3, 4, 5], begin, 2, lambda: False, ordered=True)
    assert next(requests)[0] == 1
    assert list(handles) == [1, 2, 3, 4], "2 made room for 3, 3 for 4"
    assert [line for line, _ in requests] == [2, 3, 4, 5]
    assert list(handles) == [1, 2, 3, 4, 5] and ends == []


def test_stopping_yields_what_is_done_and_cancels_the_rest(fakes):
    begin, handles, ends = fakes
    ends += [2, 1]
    requests = completed([1, 2, 3, 4, 5, 6], begin, 3, lambda: not ends, ordered=True)
    assert [line for line, _ in requests] == [1, 2]
    assert [handle.future.cancelled() for handle in handles.values()] == [False, False, True, True]
    with pytest.raises(CancelledError):
        handles[3].future.result()


def test_without_order_results_come_as_they_complete(fakes):
    begin, _, ends = fakes
    ends += [2, 3, 1, 4]
    results = completed([1, 2, 3, 4], begin, 2, lambda: False, ordered=False)
    assert [line for line, _ in results] == [2, 3, 1, 4]


def test_leaving_early_cancels_too(fakes):
    begin, handles, ends = fakes
    ends += [1]
    requests = completed([1, 2, 3], begin, 2, lambda: False, ordered=True)
    next(requests)
    requests.close()
    assert list(handles) == [1, 2] and handles[2].future.cancelled()


# On a terminal


@pytest.mark.slow
def test_a_bar_is_on_a_terminal_only_and_beside_no_json(folder, prompts, out):
    def run(*arguments, **variables):
        own = ["-m", str(folder), "--prompts", str(prompts), "--batch-size", "2", "-n", "12", *arguments]
        return CliRunner().invoke(app, ["generate", *own], env=variables)

    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color"}
    assert "prompts · time left" in run("--out", str(out), **terminal).stderr
    out.unlink()
    assert "time left" not in run("--out", str(out)).stderr
    result = run(**terminal)
    assert "time left" not in result.stderr and len(result.stdout.splitlines()) == 7
