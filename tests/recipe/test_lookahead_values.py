"""`lookahead=` where only text or JSON arrives."""

import re

import pytest

from lade import ConfigError, LookaheadConfig, Memory
from lade.recipe.generate import lookahead_from

PAPER, MEMORY = LookaheadConfig(7, 5, 9), Memory()


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ("auto", "auto"),
        ("none", None),
        (PAPER, PAPER),
        ("window=7;ngram=5;guesses=9", PAPER),
        ('{"window": 7, "ngram": 5, "guesses": 9}', PAPER),
        ({"window": 7, "ngram": 5, "guesses": 9}, PAPER),
        ({"memory": MEMORY}, LookaheadConfig(memory=MEMORY)),
        ("window=7,ngram=5,guesses=9,prompt_ngrams=False", LookaheadConfig(7, 5, 9, prompt_ngrams=False)),
    ],
)
def test_a_value_is_read(value: object, meant: object) -> None:
    assert lookahead_from(value) == meant


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "lookahead='' is not valid: give \"auto\""),
        ('{"window": 7', 'lookahead=\'{"window": 7\' is not valid: give "auto"'),
        (True, 'lookahead=True is not valid: give "auto"'),
        ("windows=7", "unknown field 'windows': give some of window, ngram, guesses"),
        ("window=15;budget=3", "budget=3 is not valid: it belongs to the adaptive method"),
    ],
)
def test_a_wrong_value_is_named_with_its_remedy(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        lookahead_from(value)
