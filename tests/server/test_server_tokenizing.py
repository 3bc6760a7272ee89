"""Texts are tokenised beside each other, so many at a time, and not at all where they cannot fit or nobody waits."""

import json
import random
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from served import CONTEXT, SOON, TOKENIZER, running, until
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lade.server.access_log import AccessLog
from lade.server.served_model import Span, TextEncoder, span_of
from lade.server.service import PREPARING_LARGE, SMALL

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
JOINED = ["ab", "abab", "Ġa", "aa", "aaaa"]
SPACED = ["▁", "a", "b", "▁a", "ab", "▁▁", "▁▁▁▁", "é"]


def bpe(names, merges, **more):
    return models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges, **more)


def made(model, normalizer=None, pre_tokenizer=None, added=()):
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def byte_level(**parts):
    merges = [("a", "b"), ("ab", "ab"), ("Ġ", "a"), ("a", "a"), ("aa", "aa")]
    parts.setdefault("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False))
    return made(bpe([*BYTES, *JOINED], merges), **parts)


def spaced(*more, **parts):
    merges = [("▁", "a"), ("a", "b"), ("▁", "▁"), ("▁▁", "▁▁")]
    to_marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    model = bpe([*FALLBACK, *SPACED], merges, byte_fallback=True, fuse_unk=True, unk_token="a")
    return made(model, normalizers.Sequence([*more, *to_marks]), **parts)


SPLIT = pre_tokenizers.Split(" ", "isolated")
KNOWN = {
    "bytes": (byte_level(), Span(4)),
    "composed": (byte_level(normalizer=normalizers.NFC()), Span(16)),
    "a long one that swallows spaces": (byte_level(added=[AddedToken("<|end|>", rstrip=True)]), Span(7, True)),
    "split": (
        byte_level(pre_tokenizer=pre_tokenizers.Sequence([SPLIT, pre_tokenizers.ByteLevel(use_regex=False)])),
        Span(4),
    ),
    "stripped": (byte_level(normalizer=normalizers.Strip()), Span(4, True)),
    "words": (
        byte_level(
            pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
        ),
        Span(4, True),
    ),
    "spaces as marks": (spaced(), Span(6)),
    "two spaces as one mark": (spaced(normalizers.Replace("  ", "▁")), Span(12)),
    "bytes of the toy": (TOKENIZER, Span(4)),  # </s>
}
UNKNOWN = {
    "accents": byte_level(normalizer=normalizers.StripAccents()),
    "what a pattern finds": spaced(normalizers.Replace("a", "")),
    "spaces that split": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    ),
    "letters without a token": made(bpe(["a", "b"], [], unk_token="a", fuse_unk=True)),
    "bytes without a token": made(bpe(BYTES[1:], []), pre_tokenizer=pre_tokenizers.ByteLevel()),
    "words without one": made(models.WordPiece(vocab={"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    "whatever Python does": object(),
}
PIECES = [
    "a",
    "aa" * 9,
    "ab" * 5,
    " ",
    "    ",
    "\n",
    "é",
    "e\u0301",
    "\u03b1\u0313\u0300\u0345",
    "한",
    "\U0001d6fc",
    "<|end|>",
    "\t",
]


@pytest.mark.parametrize("name", KNOWN)
def test_no_text_has_fewer_tokens_than_its_characters_say(name):
    tokenizer, span = KNOWN[name]
    assert span_of(tokenizer) == span
    draw = random.Random(7)
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(60))) for _ in range(60)]
    texts += [piece * 100 for piece in PIECES]
    for text in texts:
        count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert span.least_tokens(text) <= count, text
        TextEncoder(tokenizer, count + 1).check(text)
        assert len(TextEncoder(tokenizer, 5).first_ids(text)) <= 5
    assert span.least_tokens("a" * 10_000) > 100


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_a_token_may_stand_for_anything_nothing_is_said(name):
    assert span_of(UNKNOWN[name]) is None


LONG = "a" * 4 * 2**20
SLOW = "b" * (CONTEXT - 50)
TURNS = [{"role": "user", "content": LONG}]
TOO_LONG = [
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": ["a", LONG]}),
    ("/v1/chat/completions", {"messages": TURNS}),
    ("/v1/messages", {"messages": TURNS, "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": TURNS}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/responses/input_tokens", {"input": LONG}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": TURNS}),
]


class Watched:
    """A tokenizer that notes what it is given, and can be held up."""

    def __init__(self, tokenizer):
        self._tokenizer, self.seen = tokenizer, []
        self.inside, self.go_on = threading.Semaphore(0), threading.Event()

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, text, **arguments):
        self.seen.append(text)
        if text.startswith("b"):
            self.inside.release()
            assert self.go_on.wait(SOON)
        return self._tokenizer(text, **arguments)


@pytest.fixture
def watched():
    """A server for small bodies, its tokenizer, and how to begin slow calls."""
    log = partial(AccessLog, as_json=True)
    with running(max_rows=1, max_waiting=40, max_body=5 * 2**20, log=log) as server:
        server.service.encoder._tokenizer = tokenizer = Watched(TOKENIZER)
        yield server, tokenizer
        tokenizer.go_on.set()


@pytest.mark.parametrize(("path", "body"), TOO_LONG)
def test_what_can_never_fit_is_not_tokenised(watched, path, body):
    server, tokenizer = watched
    response = server.http.post(path, json=body)
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and ("context" in message or "prompt is too long" in message)
    assert re.search(r"\b10485\d\d\b", message), "a token of the toy has four characters at most"
    assert sum(map(len, tokenizer.seen)) < 100, "4 MB were tokenised"


def test_a_prediction_is_tokenised_as_far_as_an_answer_may_go(watched):
    server, tokenizer = watched
    body = {"prompt": "a", "prediction": {"type": "content", "content": LONG}, "max_tokens": 4}
    assert server.http.post("/v1/completions", json=body).status_code == 200
    assert max(map(len, tokenizer.seen)) <= 4 * CONTEXT


def padded(**body):
    """As large as those that have threads of their own."""
    return {**body, "user": "x" * SMALL}


def test_nobody_waits_for_a_text_that_takes_long(watched):
    """Neither where both are small, nor for any number of large ones."""
    server, tokenizer = watched
    with ThreadPoolExecutor(PREPARING_LARGE + 3) as pool:
        slow = [pool.submit(server.http.post, "/tokenize", json={"prompt": SLOW})]
        slow += [
            pool.submit(server.http.post, "/tokenize", json=padded(prompt=SLOW)) for _ in range(PREPARING_LARGE + 2)
        ]
        for _ in range(1 + PREPARING_LARGE):
            assert tokenizer.inside.acquire(timeout=SOON)
        assert server.http.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3
        assert server.complete("abc", max_tokens=2).status_code == 200
        assert server.chat("abc", max_tokens=2).status_code == 200
        tokenizer.go_on.set()
        assert [each.result().json()["count"] for each in slow] == [len(SLOW)] * len(slow)


def sent(server, path, body):
    """A client that waits for an answer."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    client = socket.create_connection(("127.0.0.1", server.port), timeout=SOON)
    client.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
    return client


def test_what_nobody_waits_for_any_more_is_not_tokenised(watched):
    server, tokenizer = watched
    clients = [sent(server, "/tokenize", padded(prompt=SLOW)) for _ in range(PREPARING_LARGE + 6)]
    for _ in range(PREPARING_LARGE):
        assert tokenizer.inside.acquire(timeout=SOON)
    for client in clients:
        client.close()
    until(lambda: len(server.lines) == len(clients))
    tokenizer.go_on.set()
    response = server.http.post("/tokenize", json=padded(prompt="abc"))
    assert response.json()["count"] == 3 and len(tokenizer.seen) == PREPARING_LARGE + 1


def test_the_rest_of_a_request_is_not_tokenised_either(watched):
    server, tokenizer = watched
    with sent(server, "/v1/completions", {"prompt": [SLOW, "a", "b"]}):
        assert tokenizer.inside.acquire(timeout=SOON)
    until(lambda: not server.service.in_flight)
    tokenizer.go_on.set()
    assert server.http.post("/tokenize", json={"prompt": "abc"}).json()["count"] == 3
    assert tokenizer.seen == [SLOW, "abc"]


def test_tokenising_takes_a_place_as_answers_do():
    with running(max_rows=1, max_waiting=1) as server, ThreadPoolExecutor(2) as pool:
        server.service.encoder._tokenizer = tokenizer = Watched(TOKENIZER)
        slow = [pool.submit(server.http.post, "/tokenize", json={"prompt": SLOW}) for _ in range(2)]
        until(lambda: server.service.snapshot().waiting == 2)
        refused = server.http.post("/tokenize", json={"prompt": "abc"})
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_overloaded"
        assert server.http.post("/detokenize", json={"tokens": [1]}).status_code == 503
        tokenizer.go_on.set()
        assert {each.result().status_code for each in slow} == {200}
        assert server.http.post("/tokenize", json={"prompt": "abc"}).status_code == 200
