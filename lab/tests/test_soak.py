"""`python -m lade_lab soak`: requests that come again, samples, and what is made of them."""

import json
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
from matplotlib import rc_context

from lade_lab.live_server import CHAT, MESSAGES, RESPONSES, BrokenAnswerError, Reply, answer_of
from lade_lab.report.theme import RC, as_svg
from lade_lab.soak.figure import draw
from lade_lab.soak.requests import KINDS, REPEATED, pick
from lade_lab.soak.verdict import slope, verdict, warm

SAMPLE = {"rss_mb": 600.0, "descriptors": 20, "threads": 10, "probe_ms": 100.0, "probe_processor_ms": 80.0}
SAMPLE |= {"equal": True, "requests": 900, "lost": 0, "compared": 300, "different": 0}


def samples(minutes=40, **by_minute):
    return [{**SAMPLE, "minute": m, **{name: of(m) for name, of in by_minute.items()}} for m in range(1, minutes + 1)]


def missed(found):
    return [each.what for each in found if not each.passed]


def test_a_server_that_stays_as_it_was_meets_all_bars():
    assert missed(verdict(samples())) == []
    assert missed(verdict(samples(rss_mb=lambda m: 600 + 1.5 * m))) == []
    assert missed(verdict(samples(rss_mb=lambda m: 600 + min(200, 20 * m)))) == [], "the first ten minutes are free"


@pytest.mark.parametrize(
    ("what", "name", "of"),
    [
        ("memory (RSS) grows", "rss_mb", lambda m: 600 + 2.5 * m),
        ("descriptors", "descriptors", lambda m: 20 + m // 5),
        ("threads", "threads", lambda m: 10 + m // 5),
        ("latency of the probe", "probe_ms", lambda m: 100 + 4 * m),
        ("processor time of the probe", "probe_processor_ms", lambda m: 80 + 2 * m),
        ("probe's answers, greedy and sampled", "equal", lambda m: m != 7),
        ("answers to repeated requests", "different", lambda m: m > 39),
        ("requests lost", "lost", lambda m: m > 30),
    ],
)
def test_each_bar_can_be_missed(what, name, of):
    assert missed(verdict(samples(**{name: of}))) == [what]


def test_too_few_samples_say_nothing_and_a_probe_without_an_answer_misses_its_bars():
    assert missed(verdict([])) == missed(verdict(samples(2))) == ["samples after the warm-up"]
    assert warm(samples(30))[0]["minute"] == 5, "a sixth of a short run"
    assert slope(samples(rss_mb=lambda m: 3 * m), "rss_mb") == pytest.approx(3)
    found = samples(probe_ms=lambda m: float("nan") if m > 35 else 100.0, equal=lambda m: m <= 35)
    assert "probe's answers, greedy and sampled" in missed(verdict(found))


def test_the_picture_is_the_same_for_the_same_samples():
    with rc_context(RC):
        one, other = (as_svg(draw(samples())) for _ in range(2))
    assert one == other and "RSS, MB" in one


def test_requests_of_all_kinds_come_and_half_of_them_again():
    rng = random.Random(2)
    picked = [pick(rng, number) for number in range(2000)]
    assert {name.split()[0] for name, _ in picked} == {kind.__name__ for kind in KINDS}
    again = [name for name, _ in picked if int(name.split()[1]) < REPEATED]
    assert 800 < len(again) < 1200 and min(Counter(again).values()) >= 1
    by_name = dict(picked)
    assert all(by_name[name] == request for name, request in picked), "of one name there is one request"
    assert all(isinstance(each.body, bytes) or json.dumps(each.body) for each in by_name.values())


def streamed(*events, done=True):
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * done
    return Reply(200, "".join(lines).encode(), {"content-type": "text/event-stream"}, 0.0)


def chunk(finish=None, **delta):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def test_answers_have_one_form_streamed_or_whole():
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"content": "ab", "reasoning_content": "hm", "tool_calls": [call]}
    body = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    whole = Reply(200, json.dumps(body).encode(), {"content-type": "application/json"}, 0.0)
    pieces = [chunk(reasoning_content="hm"), chunk(content="a"), chunk(content="b")]
    calls = [chunk(tool_calls=[{"index": 0, **call}]), chunk("tool_calls")]
    found = answer_of(CHAT, whole)
    assert found == answer_of(CHAT, streamed(*pieces, *calls))
    assert found.text == "ab" and found.of_kind("call") == ["add {}"] and found.ends == ["tool_calls"]


@pytest.mark.parametrize(
    ("path", "reply"),
    [
        (CHAT, streamed(chunk("stop", content="a"), done=False)),
        (CHAT, streamed(chunk(content="a"))),
        (CHAT, streamed(chunk(content="a"), {"error": {"message": "a fault"}}, done=False)),
        (CHAT, Reply(500, b"", {}, 0.0)),
        (CHAT, Reply(200, b"{}", {}, 0.0)),
        (RESPONSES, streamed({"type": "response.created"}, done=False)),
        (MESSAGES, streamed({"type": "message_start"}, done=False)),
    ],
)
def test_an_answer_that_is_not_whole_is_told_of(path, reply):
    with pytest.raises(BrokenAnswerError):
        answer_of(path, reply)


def soak(*words):
    command = [sys.executable, "-m", "lade_lab", "soak", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
def test_ten_seconds_lose_nothing_and_leave_lines_and_a_picture(tmp_path):
    run = soak("--hours", 0.003, "--every", 3, "--rate", 6, "--out", tmp_path)
    records = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    found = [each for each in records if each["kind"] == "sample"]
    assert len(found) >= 1, run.stderr
    assert all(each["equal"] for each in found)
    assert found[-1]["lost"] == found[-1]["different"] == 0 < found[-1]["requests"], records
    assert (tmp_path / "server.log").read_text() == "" and "<svg" in (tmp_path / "soak.svg").read_text()
    assert run.returncode in (0, 1), "the memory of a server that is young grows"
    told = soak("--report", tmp_path / "soak.jsonl")
    assert told.stdout == run.stdout and re.search(r"requests lost +0 of", told.stdout)


def test_a_file_without_samples_is_refused(tmp_path):
    file = tmp_path / "soak.jsonl"
    file.write_text('{"kind": "start"}\n')
    run = soak("--report", file)
    assert run.returncode == 2 and "has no samples" in run.stderr
