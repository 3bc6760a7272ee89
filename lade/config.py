"""What the user may choose about lookahead decoding."""

from __future__ import annotations

from dataclasses import dataclass

from lade.errors import ConfigError


@dataclass(frozen=True)
class LookaheadConfig:
    """Sizes of lookahead decoding, named as in the paper (arXiv 2402.02057).

    Args:
        window: W, columns of the lookahead window; 0 leaves the lookahead branch out.
        ngram: N, length of the n-grams; the window has N - 1 rows. At least 2.
        guesses: G, n-grams kept per token in the pool and verified in one step; 0 leaves the pool out.
        prompt_ngrams: whether n-grams of the prompt and of the accepted text enter the pool too.
        seed: feeds a private generator for the window's first tokens. It changes which guesses are made, hence the
            speed, never the output; torch's global generator is not touched.

    Raises:
        ConfigError: a field is out of range; the message names field, value and remedy.

    >>> LookaheadConfig(window=15, ngram=5, guesses=15)
    LookaheadConfig(window=15, ngram=5, guesses=15, prompt_ngrams=True, seed=0)
    """

    window: int = 7
    ngram: int = 5
    guesses: int = 7
    prompt_ngrams: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        _require_int("window", self.window, least=0, remedy="give a whole number >= 0 (0 switches the window off)")
        _require_int("ngram", self.ngram, least=2, remedy="give a whole number >= 2")
        _require_int("guesses", self.guesses, least=0, remedy="give a whole number >= 0 (0 switches the pool off)")
        _require_int("seed", self.seed, least=0, remedy="give a whole number >= 0")
        if not isinstance(self.prompt_ngrams, bool):
            raise ConfigError("prompt_ngrams", self.prompt_ngrams, "give True or False")


def _require_int(field: str, value: object, *, least: int, remedy: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(field, value, remedy)
