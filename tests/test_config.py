"""LookaheadConfig: frozen, validated."""

import dataclasses

import pytest

from lade import ConfigError, LadeError, LookaheadConfig


def test_positional_order_and_defaults():
    assert LookaheadConfig(15, 5, 15) == LookaheadConfig(window=15, ngram=5, guesses=15)
    assert LookaheadConfig() == LookaheadConfig(7, 5, 7, prompt_ngrams=True, seed=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window", -1),
        ("window", 2.5),
        ("window", True),
        ("ngram", 1),
        ("ngram", None),
        ("guesses", -3),
        ("guesses", "7"),
        ("seed", -1),
        ("prompt_ngrams", 1),
    ],
)
def test_an_error_names_field_value_and_remedy(field, value):
    with pytest.raises(ConfigError, match=rf"^{field}={value!r} is not valid: give ") as caught:
        LookaheadConfig(**{field: value})
    assert isinstance(caught.value, LadeError) and isinstance(caught.value, ValueError)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LookaheadConfig().window = 3
