"""Chats and completions: the tokens of `model.generate`, whole and streamed."""

import threading
from pathlib import Path

import pytest
from served import MODEL, TOKENIZER, plain, running, templated, text_of
from spies import watched

from lade.server import app
from lade.server.serialization import encoded
from lade.server.served_model import TokenText

MESSAGES = [{"role": "user", "content": "hello"}]


def joined(events, member="content"):
    return "".join(event["choices"][0]["delta"].get(member) or "" for event in events[:-1] if event["choices"])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("content", ["é 🙂 ü", "hello", "a\nb"])
def test_a_greedy_answer_is_that_of_generate(server, content):
    messages = [{"role": "user", "content": content}]
    tokens = plain(templated(messages), max_new_tokens=30)
    answer = server.chat(content, temperature=0, max_tokens=30, return_token_ids=True).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == tokens and choice["message"]["content"] == text_of(tokens)
    assert answer["prompt_token_ids"] == templated(messages)
    events = server.events("/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True)
    assert events[0]["prompt_token_ids"] == templated(messages)
    assert answer["usage"]["prompt_tokens"] == len(templated(messages))
    assert answer["usage"]["completion_tokens"] == len(tokens)
    assert choice["finish_reason"] == "length" and answer["model"] == "toy" and answer["object"] == "chat.completion"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("seed", [2**64 - 1, 0, 7, -3])
def test_a_drawn_answer_is_that_of_generate_with_the_seed(server, seed):
    arguments = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2}
    tokens = plain(templated(MESSAGES), seed=seed, do_sample=True, max_new_tokens=25, **arguments)
    answer = server.chat(seed=seed, max_tokens=25, return_token_ids=True, **arguments).json()
    assert answer["choices"][0]["token_ids"] == tokens and answer["lade"]["seed"] == seed % 2**64


def test_choice_k_has_the_seed_plus_k(server):
    answer = server.chat(seed=11, n=3, max_tokens=20, return_token_ids=True).json()
    for k, choice in enumerate(answer["choices"]):
        assert choice["index"] == k
        tokens = plain(templated(MESSAGES), seed=11 + k, do_sample=True, top_k=0, max_new_tokens=20)
        assert choice["token_ids"] == tokens
    assert answer["usage"]["completion_tokens"] == 60


def test_without_a_seed_one_is_drawn_and_told(server):
    first, second = (server.chat(max_tokens=20, return_token_ids=True).json() for _ in range(2))
    assert first["choices"][0]["token_ids"] != second["choices"][0]["token_ids"]
    again = server.chat(max_tokens=20, seed=first["lade"]["seed"], return_token_ids=True).json()
    assert again["choices"] == first["choices"]


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({"logit_bias": {"70": 30, "71": -100}}, {"sequence_bias": {(70,): 30.0, (71,): -100.0}}),
        ({"stop_token_ids": [40, 41]}, {"eos_token_id": [0, 40, 41]}),
        ({"ignore_eos": True, "logit_bias": {"0": 5}}, {"eos_token_id": None, "sequence_bias": {(0,): 5.0}}),
        ({"min_tokens": 9, "logit_bias": {"0": 60}}, {"min_new_tokens": 9, "sequence_bias": {(0,): 60.0}}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
    ],
)
def test_other_arguments_mean_what_they_mean_in_generate(server, fields, arguments):
    tokens = plain(templated(MESSAGES), seed=2, do_sample=True, **{"top_k": 0, "max_new_tokens": 30, **arguments})
    answer = server.chat(seed=2, max_tokens=30, return_token_ids=True, **fields).json()
    assert answer["choices"][0]["token_ids"] == tokens
    stopped = len(tokens) < 30
    assert answer["choices"][0]["finish_reason"] == ("stop" if stopped else "length")
    if "stop_token_ids" in fields and stopped:
        assert answer["choices"][0]["stop_reason"] == tokens[-1]


def test_penalties_are_those_of_openai(server):
    ids, counts, tokens = templated(MESSAGES), {}, []
    for _ in range(25):
        logits = MODEL(input_ids=MODEL.dummy_inputs["input_ids"].new_tensor([ids + tokens])).logits[0, -1]
        for token, count in counts.items():
            logits[token] -= 1.5 * count + 0.7
        tokens.append(int(logits.argmax()))
        counts[tokens[-1]] = counts.get(tokens[-1], 0) + 1
    fields = {"presence_penalty": 0.7, "frequency_penalty": 1.5, "return_token_ids": True}
    answer = server.chat(temperature=0, max_tokens=25, **fields).json()
    assert answer["choices"][0]["token_ids"] == tokens != plain(ids, max_new_tokens=25)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lookahead", [{"budget": 12}, "auto", None, {"window": 4, "ngram": 4, "guesses": 4}])
def test_how_it_is_drafted_changes_no_token(server, lookahead):
    tokens = plain(templated(MESSAGES), max_new_tokens=40)
    answer = server.chat(temperature=0, lookahead=lookahead, return_token_ids=True).json()
    assert answer["choices"][0]["token_ids"] == tokens
    if lookahead != "auto":
        assert (answer["lade"]["fed"] == answer["lade"]["steps"]) == (lookahead is None)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_is_the_whole_answer_in_pieces(server):
    body = {"messages": MESSAGES, "seed": 4, "max_tokens": 30, "return_token_ids": True}
    whole = server.http.post("/v1/chat/completions", json=body).json()
    events = server.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    *chunks, usage = events[:-1]
    assert joined(events) == whole["choices"][0]["message"]["content"]
    tokens = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert tokens == whole["choices"][0]["token_ids"]
    assert {(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks} == {
        (usage["id"], usage["created"], "toy", "chat.completion.chunk")
    }
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_a_stream_may_hide_how_long_its_events_are(server):
    body = {"messages": MESSAGES, "seed": 5, "max_tokens": 30, "stream_options": {"include_obfuscation": True}}
    *events, done = server.events("/v1/chat/completions", **body)
    sizes = {len(encoded(event)) for event in events}
    assert len(events) > 3 and done == "[DONE]" and all(size % 256 == 0 for size in sizes)
    # short ones may be equal by chance
    long = [event["obfuscation"] for event in events if len(event["obfuscation"]) >= 32]
    assert len(set(long)) == len(long) > 3, "a constant one would be compressed"
    assert joined([*events, done]) == server.chat(seed=5, max_tokens=30).json()["choices"][0]["message"]["content"]


def test_choices_of_a_stream_begin_in_their_order(server):
    events = server.events("/v1/chat/completions", messages=MESSAGES, n=4, seed=1, max_tokens=10)[:-1]
    assert [event["choices"][0]["index"] for event in events[:4]] == [0, 1, 2, 3]
    assert all(event["choices"][0]["delta"]["role"] == "assistant" for event in events[:4])
    whole = server.chat(n=4, seed=1, max_tokens=10).json()
    for k, choice in enumerate(whole["choices"]):
        own = [event for event in events if event["choices"][0]["index"] == k]
        assert joined([*own, None]) == choice["message"]["content"]
    assert all("usage" not in event for event in events), "which nobody has asked for"


def test_a_character_is_never_split(server):
    """Bytes of é are made likely: some come in order, and what is no character becomes one mark, as in whole texts."""
    halves, texts = TOKENIZER("é")["input_ids"], []
    for seed in range(2):
        body = {"prompt": "x", "seed": seed, "max_tokens": 30, "logit_bias": {str(half): 9 for half in halves}}
        whole = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        pieces = [event["choices"][0]["text"] for event in server.events("/v1/completions", **body)[:-1]]
        arguments = {"do_sample": True, "top_k": 0, "sequence_bias": [[[half], 9.0] for half in halves]}
        tokens = plain(TOKENIZER("x")["input_ids"], seed=seed, max_new_tokens=30, **arguments)
        assert "".join(pieces) == whole == text_of(tokens)
        texts.append(whole)
    assert "é" in "".join(texts) and "\ufffd" in "".join(texts)


# --- stops ------------------------------------------------------------------------------------------------------------


def stopped_plainly(ids, stops, most):
    """The text of plain decoding before the first stop, and how many tokens it took."""
    tokens = plain(ids, max_new_tokens=most)
    for count in range(1, len(tokens) + 1):
        text = text_of(tokens[:count])
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)], count, "stop"
    return text_of(tokens), len(tokens), "length"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", [(3, 5), (10, 11), (38, 40), (0, 1)])
def test_a_text_ends_before_its_stop(server, place, stream):
    messages = [{"role": "user", "content": "stop me"}]
    ids = templated(messages)
    text = text_of(plain(ids, max_new_tokens=40))
    stop = text[place[0] : place[1]]
    expected = stopped_plainly(ids, [stop, "never there"], 40)
    body = {"messages": messages, "temperature": 0, "stop": [stop, "never there"], "lookahead": {"budget": 32}}
    if stream:
        events = server.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
        got = joined(events), events[-2]["usage"]["completion_tokens"], events[-3]["choices"][0]["finish_reason"]
    else:
        answer = server.http.post("/v1/chat/completions", json=body).json()
        (choice,) = answer["choices"]
        got = choice["message"]["content"], answer["usage"]["completion_tokens"], choice["finish_reason"]
        assert choice["stop_reason"] == (stop if expected[2] == "stop" else None)
    assert got == expected and expected[2] == "stop"


# --- completions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["abc", [98, 99], ["ab", "c"], [[70, 71, 72], [73]]])
def test_prompts_may_be_texts_or_ids_one_or_several(server, prompt):
    several = prompt if isinstance(prompt[0], str | list) and isinstance(prompt, list) else [prompt]
    ids = [TOKENIZER(each)["input_ids"] if isinstance(each, str) else each for each in several]
    answer = server.complete(prompt, temperature=0, max_tokens=12, n=2, return_token_ids=True).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(ids)))
    for number, choice in enumerate(answer["choices"]):
        assert choice["token_ids"] == plain(ids[number // 2], max_new_tokens=12)
        assert choice["text"] == text_of(choice["token_ids"])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_an_answer_is_cut_to_the_context_and_never_refused_for_its_length(server):
    answer = server.complete([65] * 500, temperature=0, max_tokens=10**9).json()
    assert answer["usage"]["completion_tokens"] == 12 and answer["choices"][0]["finish_reason"] == "length"


# --- logprobs ---------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits(server):
    ids = templated(MESSAGES)
    answer = server.chat(
        temperature=0.5, seed=3, max_tokens=12, logprobs=True, top_logprobs=5, return_token_ids=True
    ).json()
    (choice,) = answer["choices"]
    tokens, entries = choice["token_ids"], choice["logprobs"]["content"]
    text = MODEL.dummy_inputs["input_ids"].new_tensor([ids + tokens])
    rows = MODEL(input_ids=text).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
    assert len(entries) == len(tokens) == 12
    for token, row, entry in zip(tokens, rows, entries, strict=True):
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=1e-5)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(row.topk(5)[0].tolist(), abs=1e-5)
    raw = bytes(byte for entry in entries for byte in entry["bytes"])
    assert raw.decode(errors="replace") == choice["message"]["content"]
    events = server.events(
        "/v1/chat/completions", messages=MESSAGES, temperature=0.5, seed=3, max_tokens=12, logprobs=True, top_logprobs=5
    )
    streamed = [event["choices"][0]["logprobs"] for event in events[:-1]]
    assert [entry for each in streamed if each for entry in each["content"]] == entries


def test_a_token_of_a_stream_costs_as_much_as_those_before_it(server, monkeypatch):
    """Where it begins is not found by spelling all of the text again."""
    spelled = watched(monkeypatch, TokenText, "bytes")
    tokens = 200
    body = {"prompt": "abc", "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "lookahead": None}
    events = server.events("/v1/completions", **body, logprobs=0)
    offsets = [at for event in events[:-1] for at in (event["choices"][0]["logprobs"] or {}).get("text_offset", ())]
    assert len(offsets) == tokens and len(spelled) <= 3 * tokens


def test_a_prediction_is_drafted_from_and_counted(server):
    plainly = server.chat(temperature=0, max_tokens=40).json()
    text = plainly["choices"][0]["message"]["content"]
    expected = [text, [{"type": "text", "text": text[:5]}, {"type": "text", "text": text[5:]}]]
    for content in expected:
        prediction = {"type": "content", "content": content}
        answer = server.chat(temperature=0, max_tokens=40, prediction=prediction, lookahead={"budget": 16}).json()
        assert answer["choices"][0]["message"] == plainly["choices"][0]["message"]
        details = answer["usage"]["completion_tokens_details"]
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert accepted > 5  # a random model's text is not spelled with the tokens that it was written with
        assert accepted + rejected == len(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    assert "accepted_prediction_tokens" not in plainly["usage"]["completion_tokens_details"]


def test_a_streamed_request_is_followed_in_few_files():
    """From its first byte to its last event, in all threads."""
    files, package, begun = set(), str(Path(app.__file__).parent), threading.Event()

    def profile(frame, event, _):
        if begun.is_set() and event == "call" and frame.f_code.co_filename.startswith(package):
            files.add(Path(frame.f_code.co_filename).name)

    threading.setprofile(profile)
    try:
        with running() as server:
            begun.set()
            events = server.events("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
            begun.clear()
    finally:
        threading.setprofile(None)
    assert events[-1] == "[DONE]" and {"routes.py", "answer.py", "completions.py", "choice.py"} < files
    assert len(files) <= 20, sorted(files)  # one of them is the watchdog's, and metrics may come a moment later
