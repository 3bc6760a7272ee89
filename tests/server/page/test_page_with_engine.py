"""The page with the real server: what it shows is what the engine said."""

from dataclasses import replace

import pytest
from scripted_server import Script
from served import SERVED, plain, running, templated, text_of

from conftest import opened
from lade.server.keys import Key, Keys

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def real(browser, server):
    with opened(browser, f"{server.url}/", "toy", Script(), viewport={"width": 1200, "height": 800}) as seen:
        yield seen


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_texts_of_a_trace_are_the_text_of_its_event(server, path):
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": "hello"}
    events = server.events(path, **body, seed=3, max_tokens=30, stop=["zz"], lade={"trace": True})
    texts, tokens, sources = "", [], []
    for event in events[:-1]:
        (choice,) = event["choices"]
        shown = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        trace = event.get("lade", {})
        if "texts" in trace:
            assert "".join(trace["texts"]) == shown
            assert len(trace["texts"]) == len(trace["tokens"]) == len(trace["sources"]) and trace["fed"] > 0
            texts, tokens, sources = texts + shown, tokens + trace["tokens"], sources + trace["sources"]
    assert texts == text_of(tokens) and len(tokens) == 30
    assert sources[0] == "prefill" and set(sources[1:]) <= {"bonus", "memory", "pool", "window", "text"}


def test_the_page_is_told_what_the_model_takes_and_what_holds_where_nothing_is_asked(server):
    told = {"chat": True, "context": server.service.serving.context, "images": False}
    (model, _) = server.http.get("/v1/models").json()["data"]
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": server.service.settings.answer_tokens}
    assert model["lade"] == {**told, "defaults": defaults, "page": {"temperature": 0.0}}, "greedy, as `lade chat`"
    seeing = replace(SERVED, sampling={"temperature": 0.6, "top_k": 20}, encode_images=lambda messages, arguments: None)
    with running(served=seeing) as other:
        described = other.http.get("/v1/models/toy").json()["lade"]
    assert described["images"] and described["defaults"] == {**defaults, "temperature": 0.6, "top_k": 20}
    assert described["page"] == {}, "the checkpoint asks for sampling"


@pytest.mark.slow
def test_the_page_needs_no_key_and_all_else_does():
    with running(keys=Keys((Key("one", "sk-right"),)), ready=False) as server:  # while the model is being loaded, too
        for path in ("/", "/page/app.js", "/page/vendor/marked.esm.js"):
            assert server.http.get(path).status_code == 200
        for path in ("/v1/models", "/v1/lade/status", "/page/none.js"):
            assert server.http.get(path).status_code in (401, 404)
        assert server.http.get("/v1/models").status_code == 401
        assert server.http.post("/page/app.js").status_code == 401


def test_page_and_metrics_can_be_left_out():
    with running(page=False, metrics=False, ready=False) as server:
        for path in ("/", "/page/app.js", "/metrics"):
            answer = server.http.get(path)
            code = "metrics_disabled" if path == "/metrics" else "unknown_url"
            assert answer.status_code == 404 and answer.json()["error"]["code"] == code


def test_the_page_shows_the_tokens_of_generate_with_their_sources(real):
    real.button("Settings").click()
    real.page.get_by_label("Temperature").fill("0")
    real.page.get_by_label("Longest answer").fill("60")
    real.page.get_by_label("Lookahead").select_option("budget")
    text = text_of(plain(templated(MESSAGES), max_new_tokens=60))
    real.say("hello")
    real.answered(text[:10])
    real.button("Answer again").click()  # what was said before is guessed now
    real.page.locator(".answer .memory").first.wait_for()
    real.answered(text[:10])
    painted = real.answer.locator(".prose").last.locator(".token")
    assert "".join(painted.all_inner_texts()).split() == text.split()
    figures = real.answer.locator(".steps summary").inner_text()
    assert "60 tokens" in figures and float(figures.split(" tokens per pass")[0].split()[-1]) > 1.2
