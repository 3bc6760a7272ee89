"""`lade batch`: the answers of a server, in a file that survives whatever ends the run."""

import codecs
import errno
import json
import os
import signal
import threading

import pretend
import pytest
import torch
from spies import failing, watched
from test_cli_errors import fails

from lade.cli import batch_files as files
from lade.cli.batch_files import Results
from lade.serving.batch import EngineBatch

NEW = 8


@pytest.fixture(autouse=True)
def no_warm_up(monkeypatch):
    pretend.no_warm_up(monkeypatch)


def chat(custom_id, text, **fields):
    body = {"model": "chatty", "messages": [{"role": "user", "content": text}], "max_tokens": NEW, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": {**body, **fields}}


def other(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"temperature": 0, **body}}


TWELVE = [chat(str(number), f"question {number}", max_tokens=30, ignore_eos=True) for number in range(12)]


ASKED = [
    chat("a", "hello"),
    chat("bad", "hello", temperature=-1),
    other("c", "/v1/completions", prompt="one two", max_tokens=NEW),
    other("d", "/v1/responses", input="hello", max_output_tokens=NEW),
    *(chat(f"more-{number}", f"question {number}", seed=number, temperature=0.9) for number in range(4)),
]


@pytest.fixture
def asked(tmp_path):
    def write(lines=ASKED):
        file = tmp_path / "requests.jsonl"
        file.write_text("\n".join([*map(json.dumps, lines), ""]) + "\n", encoding="utf-8")
        return file

    return write


@pytest.fixture
def run(lade, templated, tmp_path):
    def batch(file, *arguments, model=templated):
        out = tmp_path / "results.jsonl"
        arguments = ("--model", model, "--dtype", "float64", "--max-rows", 2, *arguments)
        return lade("batch", "-i", file, "-o", out, *arguments), out

    return batch


def answers(out):
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines), "each once"
    return {line["custom_id"]: line for line in lines}


def text_of(line):
    return line["response"]["body"]["choices"][0]["message"]["content"]


def test_a_file_of_requests_is_answered_and_continued(run, asked, model, tokenizer, monkeypatch):
    file = asked()
    result, out = run(file)
    assert result.exit_code == 1 and "1 of 8 requests failed" in result.stderr
    found = answers(out)
    assert found.keys() == {line["custom_id"] for line in ASKED}
    ids = tokenizer("<user>hello|<assistant>")["input_ids"]
    wanted = model.double().generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :]
    model.float()
    text = tokenizer.decode(wanted)
    assert text_of(found["a"]) == text
    assert found["d"]["response"]["body"]["output"][0]["content"][0]["text"] == text
    assert found["c"]["response"]["body"]["object"] == "text_completion"
    bad = found["bad"]
    assert bad["response"]["status_code"] == 400 and bad["response"]["body"]["error"]["param"] == "temperature"
    assert bad["error"] is None and bad["response"]["request_id"].startswith("req-")
    fails(run(file)[0], "--resume")
    # torn in the third line, as by a kill: what is whole is kept, what is not is asked again
    whole = out.read_text(encoding="utf-8").splitlines(keepends=True)
    out.write_text("".join(whole[:2]) + whole[2][:30], encoding="utf-8")
    result, out = run(file, "--resume")
    again = answers(out)
    assert all(text_of(again[name]) == text_of(found[name]) for name in found if name.startswith("more"))
    mended = asked([each for each in ASKED if each["custom_id"] != "bad"])
    fails(run(mended, "--resume")[0], "custom_id")
    fails(run(asked([chat("a", "goodbye"), *ASKED[1:]]), "--resume")[0], "changed")


def test_resume_on_a_full_disk_says_so_and_keeps_what_is_there(run, asked, monkeypatch):
    file = asked(ASKED[:3])
    _, out = run(file)
    before = out.read_bytes()
    failing(monkeypatch, files, "write_whole", OSError(errno.ENOSPC, "No space left on device"))
    result, _ = run(file, "--resume")
    assert result.exit_code == 2 and "No space left on device" in result.stderr and "Traceback" not in result.stderr
    assert out.read_bytes() == before


def test_ctrl_c_keeps_what_is_answered_and_resume_answers_the_rest(run, asked, monkeypatch):
    file, written = asked(TWELVE), []

    def interrupt(*_):
        if len(written) == 2:  # and this is the third one
            threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    before = signal.getsignal(signal.SIGINT)
    written = watched(monkeypatch, Results, "write", interrupt)
    result, out = run(file)
    assert result.exit_code == 130 and "with --resume continues" in result.stderr
    assert signal.getsignal(signal.SIGINT) is before
    kept = answers(out)
    assert 3 <= len(kept) < 12
    result, out = run(file, "--resume")
    assert result.exit_code == 0 and "continuing after" not in result.stdout
    assert answers(out).keys() == {line["custom_id"] for line in TWELVE}
    assert {name: answers(out)[name] for name in kept} == kept
    assert run(file, "--resume")[0].exit_code == 0


def test_a_file_of_prompts_is_one_of_requests(run, asked):
    lines = [{"messages": ASKED[0]["body"]["messages"]}, {"prompt": "one two", "seed": 3}]
    whole = [chat("1", "hello"), other("2", "/v1/completions", prompt="one two", seed=3)]
    options = {"max_tokens": NEW, "temperature": 0}
    result, out = run(asked([{**line, **options} for line in lines]))
    assert result.exit_code == 0, result.output
    found = answers(out)
    out.unlink()
    run(asked([{**each, "body": {**each["body"], **options}} for each in whole]))
    assert text_of(found["1"]) == text_of(answers(out)["1"])
    texts = [each["2"]["response"]["body"]["choices"][0]["text"] for each in (found, answers(out))]
    assert texts[0] == texts[1] != ""


def test_a_second_ctrl_c_waits_for_nothing(run, asked, monkeypatch):
    def interrupt(*_):
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("too late")

    watched(monkeypatch, Results, "write", interrupt)
    result, out = run(asked(TWELVE))
    assert result.exit_code == 130 and "0 of 12 requests" in result.stderr
    assert answers(out) == {}


def test_an_engine_that_breaks_down_ends_the_run(run, asked, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    file = asked([chat(str(number), "hello") for number in range(9)])
    with monkeypatch.context() as patch:
        failing(patch, EngineBatch, "advance", MemoryError("all is lost"))
        result, out = run(file)
    assert result.exit_code == 1 and "the engine failed (MemoryError: all is lost)" in result.stderr
    assert run(file, "--resume")[0].exit_code == 0
    assert len(answers(out)) == 9


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "JSON"),
        ("[]", "object"),
        (json.dumps({**ASKED[0], "custom_id": None}), "custom_id is missing"),
        (json.dumps({**ASKED[0], "method": "GET"}), 'method is "GET"'),
        (json.dumps({**ASKED[0], "url": "/v1/embeddings"}), "give one of /v1/chat/completions"),
        (json.dumps({**ASKED[0], "body": []}), "body is []"),
        (json.dumps(chat("b", "x", stream=True)), "body.stream"),
        (json.dumps(chat("a", "x")), "custom_id 'a' is used by line 1"),
    ],
)
def test_a_file_that_is_none_is_refused_before_the_model_is_loaded(run, tmp_path, line, word):
    file = tmp_path / "requests.jsonl"
    file.write_text(f"{json.dumps(ASKED[0])}\n\n{line}\n", encoding="utf-8")
    result, out = run(file, model="no/such/model")
    fails(result, word, "line 3")
    assert not out.exists()


def test_shards_answer_disjoint_parts_and_a_byte_order_mark_is_no_part_of_the_first_request(run, asked):
    file = asked([chat(name, name) for name in "abcde"])
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    result, out = run(file)
    assert result.exit_code == 0, result.output
    whole, parts = answers(out), {}
    for shard, names in (("1/2", "ace"), ("2/2", "bd")):
        out.unlink()
        assert run(file, "--shard", shard)[0].exit_code == 0
        part = answers(out)
        assert sorted(part) == list(names)
        parts |= part
        fails(run(file, "--shard", "1/5", "--resume")[0], "custom_id")
    assert {name: text_of(line) for name, line in parts.items()} == {n: text_of(each) for n, each in whole.items()}


@pytest.mark.slow
def test_a_memory_is_what_all_begin_with(run, asked, lade, templated, tmp_path, prompt_lines):
    prompts, memory = prompt_lines({"messages": ASKED[0]["body"]["messages"]}), tmp_path / "m.memory"
    warmed = lade("warm", "--model", templated, "--prompts", prompts, "--out", memory, "--max-new-tokens", 40)
    assert warmed.exit_code == 0, warmed.output
    lines = [chat("a", "hello", max_tokens=40, ignore_eos=True)]
    result, out = run(asked(lines))
    cold = answers(out)["a"]
    out.unlink()
    result, out = run(asked(lines), "--memory", memory)
    assert result.exit_code == 0, result.output
    warm = answers(out)["a"]
    assert text_of(warm) == text_of(cold)
    steps = [line["response"]["body"]["lade"]["steps"] for line in (warm, cold)]
    assert steps[0] < steps[1]
