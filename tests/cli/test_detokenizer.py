import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lade import Step
from lade.cli.run import RUNS, Painter
from lade.hf.detokenizer import Detokenizer

TEXTS = [
    "plain words, and more of them, so many that the window has to move on several times while they come",
    "zażółć gęślą jaźń ☃ 日本語のテキスト 👩‍👩‍👧 end",
    "👍" * 300,
    " leading\n\n\tand trailing space ",
    "",
]


def chunks(ids, seed, largest):
    rng, start = random.Random(seed), 0
    while start < len(ids):
        size = rng.randint(1, largest)
        yield ids[start : start + size]
        start += size


def streamed(tokenizer, ids, seed, context=(), largest=5):
    detokenizer = Detokenizer(tokenizer, context)
    return [*(detokenizer.push(chunk) for chunk in chunks(ids, seed, largest)), detokenizer.flush()]


@pytest.fixture(scope="module")
def sentencepiece():
    """Words that carry their space, of which the first of a text is taken off."""
    words = ["</s>", *(f"▁{word}" for word in ("the", "cat", "sat", "on", "a", "mat")), "s", "."]
    words += [f"<0x{byte:02X}>" for byte in range(256)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="</s>"))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("seed", range(5))
def test_pieces_join_to_the_text(tokenizer, text, seed):
    ids = tokenizer(text)["input_ids"]
    assert "".join(streamed(tokenizer, ids, seed)) == text


@pytest.mark.parametrize("seed", range(20))
def test_words_with_spaces_join_to_the_decoded_ids(sentencepiece, seed):
    rng = random.Random(seed)
    ids = [rng.choice([0, *range(1, 9)]) for _ in range(100)]
    assert "".join(streamed(sentencepiece, ids, seed)) == sentencepiece.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("largest", [1, 4])
def test_characters_made_of_byte_tokens_join_to_the_decoded_ids(sentencepiece, seed, largest):
    rng = random.Random(seed)
    pieces = ["日", "é", "👍", "語", *([1, 2] if seed % 2 else [])]
    ids = []
    for piece in (rng.choice(pieces) for _ in range(60)):
        ids += [piece] if isinstance(piece, int) else [9 + byte for byte in piece.encode()]
    text = sentencepiece.decode(ids)
    assert "\ufffd" not in text
    assert "".join(streamed(sentencepiece, ids, seed, largest=largest)) == text


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_characters_do_no_harm(tokenizer, seed):
    rng = random.Random(seed)
    ids = [rng.randrange(1, 257) if rng.random() < 0.5 else tokenizer("é")["input_ids"][0] for _ in range(200)]
    assert "".join(streamed(tokenizer, ids, seed)) == tokenizer.decode(ids)


def test_a_character_is_held_back_until_it_is_complete_and_what_stands_before_it_is_not(tokenizer):
    ids = tokenizer("ab☃c")["input_ids"]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(part) for part in (ids[:3], ids[3:4], ids[4:])] == ["ab", "", "☃c"]
    assert detokenizer.flush() == ""
    detokenizer = Detokenizer(tokenizer)
    assert (detokenizer.push(ids[:4]), detokenizer.flush(), detokenizer.flush()) == ("ab", "\ufffd", "")


def test_the_cost_of_a_step_is_bounded(tokenizer):
    class Counting:
        longest = 0

        def decode(self, ids, **kwargs):
            self.longest = max(self.longest, len(ids))
            return tokenizer.decode(ids, **kwargs)

    counting = Counting()
    streamed(counting, tokenizer("all words " * 100)["input_ids"], 0)
    assert counting.longest < 40
    streamed(counting, tokenizer("é")["input_ids"][:1] * 500, 0)
    assert counting.longest < 160


def test_neighbouring_runs_have_different_colours_and_single_tokens_none():
    styles = []
    tokenizer = SimpleNamespace(decode=lambda ids, **_: "x" * len(ids))
    term = SimpleNamespace(write=lambda text, style: styles.append(style))
    painter = Painter(SimpleNamespace(tokenizer=tokenizer), term)
    for tokens in (1, 3, 2, 1, 1, 4, 2):
        painter(Step(1, [0] * tokens, ["bonus"] * tokens, tokens, 0.0))
    assert [styles[i] for i in (0, 3, 4)] == [""] * 3
    assert {styles[1], styles[2]} == {styles[5], styles[6]} == set(RUNS)
    assert styles[2] != styles[5]
