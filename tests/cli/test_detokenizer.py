import random
from types import SimpleNamespace

import pytest
from shell_fixtures import word_tokenizer

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


SENTENCEPIECE = word_tokenizer("s", ".", *(f"<0x{byte:02X}>" for byte in range(256)))


def streamed(tokenizer, ids, seed, largest=5):
    """The text of ids that come in pieces of random length."""
    rng, detokenizer, pieces, start = random.Random(seed), Detokenizer(tokenizer), [], 0
    while start < len(ids):
        size = rng.randint(1, largest)
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    return "".join(pieces) + detokenizer.flush()


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("seed", range(5))
def test_pieces_join_to_the_text(tokenizer, text, seed):
    assert streamed(tokenizer, tokenizer(text)["input_ids"], seed) == text


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("largest", [1, 4])
def test_words_with_spaces_and_characters_made_of_byte_tokens_join_to_the_decoded_ids(seed, largest):
    rng = random.Random(seed)
    characters = [[9 + byte for byte in character.encode()] for character in "日é👍語"]
    words = [[token] for token in range(9)]
    pieces = (characters, words, [*characters, *words[1:3]], [*characters, *words])[seed % 4]
    ids = [token for _ in range(60) for token in rng.choice(pieces)]
    text = SENTENCEPIECE.decode(ids, skip_special_tokens=True)
    assert "\ufffd" not in text
    assert streamed(SENTENCEPIECE, ids, seed, largest) == text


@pytest.mark.parametrize("seed", range(20))
def test_bytes_that_are_no_characters_do_no_harm(tokenizer, seed):
    rng = random.Random(seed)
    ids = [rng.randrange(1, 257) if rng.random() < 0.5 else tokenizer("é")["input_ids"][0] for _ in range(200)]
    assert streamed(tokenizer, ids, seed) == tokenizer.decode(ids)


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
