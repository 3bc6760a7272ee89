"""`echo` with `logprobs`: how likely the model finds a prompt, as programs ask that compare likelihoods of texts."""

import threading
from dataclasses import replace

import openai
import pytest
import torch
from served import CONTEXT, MODEL, SERVED, TOKENIZER, byte_model, plain, running, text_of, until
from spies import watched

from lade.server import completions
from lade.server.completions import CompletionLogprobs
from lade.server.served_model import TokenText
from lade.stats import TokenLogprobs

SHORT = {"temperature": 0, "max_tokens": 6}


def logprobs_of(ids):
    """`[L, V]`: what the model's own pass says of all tokens that come behind each."""
    with torch.no_grad():
        return MODEL(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)


def check(told, ids, top):
    """Lists that are told of a text of these ids."""
    rows, (first, *own) = logprobs_of(ids), told["token_logprobs"]
    assert first is None and told["top_logprobs"][0] is None and len(told["tokens"]) == len(ids)
    assert own == pytest.approx([rows[at, token].item() for at, token in enumerate(ids[1:])], abs=1e-5)
    for at, (value, found) in enumerate(zip(own, told["top_logprobs"][1:], strict=True)):
        assert value in found.values() and len(found) <= top + 1
        if not top:
            continue
        assert max(found.values()) == pytest.approx(rows[at].max().item(), abs=1e-5)
        likeliest = rows[at].argmax().item() == ids[at + 1]
        assert (value == max(found.values())) == likeliest, "whether a token is greedy is seen by =, as lm-eval does"


@pytest.mark.parametrize(("top", "tokens"), [(0, 6), (1, 0), (5, 1)])
def test_a_prompt_is_told_with_its_logprobs(server, top, tokens):
    prompt, body = "Onçe upon a time", {"temperature": 0, "max_tokens": tokens, "echo": True, "logprobs": top}
    ids = TOKENIZER(prompt)["input_ids"]
    answer = plain(ids, max_new_tokens=tokens) if tokens else []
    for given in (prompt, ids):
        whole = server.complete(given, **body).json()
        (choice,) = whole["choices"]
        assert choice["text"] == prompt + text_of(answer) and choice["finish_reason"] == "length"
        check(choice["logprobs"], [*ids, *answer], top)
        assert choice["logprobs"]["text_offset"][:5] == [0, 1, 2, 2, 3], "the third letter is of two tokens"
        assert choice["logprobs"]["text_offset"][len(ids) :] == list(range(len(prompt), len(prompt) + tokens))
        assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (len(ids), tokens)
    chunks = [event["choices"][0] for event in server.events("/v1/completions", prompt=prompt, **body)[:-1]]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    assert chunks[-1]["finish_reason"] == "length"
    streamed = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    for name, values in choice["logprobs"].items():
        assert [value for told in streamed for value in told[name]] == values, name


def test_without_logprobs_the_prompt_alone_is_told(server):
    assert server.complete("abc", echo=True, max_tokens=0).json()["choices"][0]["text"] == "abc"
    full = server.complete([65] * CONTEXT, echo=True, max_tokens=0, logprobs=1)
    assert full.json()["usage"]["completion_tokens"] == 0, "where there is no room for an answer none is needed"
    check(full.json()["choices"][0]["logprobs"], [65] * CONTEXT, 1)
    assert server.complete([65] * (CONTEXT + 1), echo=True, max_tokens=0, logprobs=1).status_code == 400


def test_likelihoods_are_had_as_an_evaluation_harness_asks_for_them(server):
    """Several contexts and continuations as ids in one request, one token too many, sums over the continuations."""
    pairs = [("The sky is", " blue"), ("The sky is", " green"), ("x", "yz")]
    encoded = [(TOKENIZER(context)["input_ids"], TOKENIZER(end)["input_ids"]) for context, end in pairs]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="toy",
            prompt=[a + b for a, b in encoded],
            max_tokens=1,
            logprobs=1,
            echo=True,
            temperature=0,
            seed=1234,
        )
    for choice, (context, end) in zip(sorted(answer.choices, key=lambda each: each.index), encoded, strict=True):
        told = choice.logprobs.token_logprobs[len(context) : -1]
        rows = logprobs_of([*context, *end])[len(context) - 1 : -1]
        expected = sum(rows[at, token].item() for at, token in enumerate(end))
        assert len(told) == len(end) and sum(told) == pytest.approx(expected, abs=1e-4)
        assert len(choice.logprobs.top_logprobs) == len(choice.logprobs.tokens) == len(context) + len(end) + 1


def test_many_logprobs_are_spelled_beside_the_event_loop(monkeypatch):
    """A probe is answered while they are."""
    with running(replace(SERVED, model=byte_model(TOKENIZER))) as server:

        def meanwhile(logprobs, *arguments):
            assert server.http.get("/live").status_code == 200
            return len(arguments[2])

        seen = watched(monkeypatch, completions.CompletionLogprobs, "of_prompt", meanwhile)
        assert server.complete("abcdef", echo=True, logprobs=1, max_tokens=0).status_code == 200
        until(server.at_rest)
    assert seen == [5]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_logprobs_of_whole_answers_are_spelled_beside_the_event_loop(server, monkeypatch, path):
    threads = watched(monkeypatch, TokenText, "text", lambda *_: threading.current_thread())
    chat = path.startswith("chat")
    asked = {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2} if chat else {"prompt": "a"}
    answer = server.http.post(f"/v1/{path}", json={**asked, "logprobs": True if chat else 2, "max_tokens": 5})
    assert answer.status_code == 200, answer.text
    assert threads and server.thread not in threads


def test_of_tokens_that_are_spelled_alike_the_likeliest_counts():
    spelling, (first, second) = TokenText(TOKENIZER), TOKENIZER("é")["input_ids"]
    assert spelling.text(first) == spelling.text(second)
    told = CompletionLogprobs(spelling).of([TokenLogprobs(second, -2.0, [(first, -1.0), (second, -2.0)])])
    assert told["top_logprobs"] == [{spelling.text(first): -1.0}]
