"""What the user may choose about lookahead decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lade.errors import ConfigError

MOST_COLUMNS, MOST_NGRAM, MOST_BUDGET = 256, 32, 1024
"""The largest sizes: several times those that gain anything anywhere, and small enough for a step to end."""
WINDOW, NGRAM, GUESSES = 7, 5, 7
"""The paper's sizes for models of about 7B parameters."""


class BaseMemory:
    """Base of `lade.Memory`, by which a config knows one without importing what a memory needs."""


@dataclass(frozen=True)
class LookaheadConfig:
    """How to draft. Without arguments: the adaptive method, which needs no tuning.

    Explicit `window`, `ngram` or `guesses` mean the method of the paper (arXiv 2402.02057) at just these sizes.

    Args:
        window: W, columns of the lookahead window; 0 leaves the lookahead branch out. At most 256; default 7.
        ngram: N, length of the n-grams; the window has N - 1 rows. From 2 to 32; default 5.
        guesses: G, n-grams kept per token in the pool and verified in one step; 0 leaves the pool out. At most 256;
            default 7.
        prompt_ngrams: whether n-grams of the prompt and of the accepted text enter the pool too.
        adaptive: each step takes the tree that is expected to yield most tokens per second on this machine, plain
            decoding included. Default: true, unless a size is given. With false: the paper's method.
        budget: tokens fed per step, the root included, by the adaptive method, instead of what it would choose; at
            most, since a text may offer no more. From 1 to 1024.
        memory: a `lade.Memory` for the adaptive method to use and to fill, instead of one that ends with the request.
        mtp: whether the adaptive method drafts with the multi-token prediction (MTP) layers of the checkpoint, too:
            None where they are found, can be used and pay; False nowhere; with True it is an error if they cannot be.
        seed: feeds a private generator for the window's first tokens. It changes which guesses are made, hence the
            speed, never the output; torch's global generator is not touched.

    Raises:
        ConfigError: a field is out of range, or two contradict each other; the message names field, value and remedy.

    >>> LookaheadConfig(window=15, ngram=5, guesses=15).adaptive
    False
    >>> LookaheadConfig(budget=32).adaptive
    True
    """

    window: int = None  # type: ignore[assignment]  # None only until __post_init__: given sizes must be told apart
    ngram: int = None  # type: ignore[assignment]
    guesses: int = None  # type: ignore[assignment]
    prompt_ngrams: bool = True
    adaptive: bool = None  # type: ignore[assignment]
    budget: int | None = None
    memory: BaseMemory | None = None
    seed: int = 0
    mtp: bool | None = None

    def __post_init__(self) -> None:
        sizes = {"window": self.window, "ngram": self.ngram, "guesses": self.guesses}
        given = {name: size for name, size in sizes.items() if size is not None}
        if self.adaptive is None:
            object.__setattr__(self, "adaptive", not given)
        for name, default in (("window", WINDOW), ("ngram", NGRAM), ("guesses", GUESSES)):
            object.__setattr__(self, name, given.get(name, default))
        self._check_types()
        self._check_method(given)

    def _check_types(self) -> None:
        _require_int("window", self.window, 0, MOST_COLUMNS, " (0 switches the window off)")
        _require_int("ngram", self.ngram, 2, MOST_NGRAM)
        _require_int("guesses", self.guesses, 0, MOST_COLUMNS, " (0 switches the pool off)")
        _require_int("seed", self.seed, 0)
        if self.budget is not None:
            _require_int("budget", self.budget, 1, MOST_BUDGET, " (1 decodes plainly), or None")
        for field in ("prompt_ngrams", "adaptive"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(field, getattr(self, field), "give True or False")
        if self.mtp is not None and not isinstance(self.mtp, bool):
            raise ConfigError("mtp", self.mtp, "give True, False, or None to use MTP layers where they pay")
        if self.memory is not None and not isinstance(self.memory, BaseMemory):
            raise ConfigError("memory", self.memory, "give a lade.Memory, or None")

    def _check_method(self, given: dict[str, int]) -> None:
        if not self.adaptive:
            for field in ("budget", "memory", "mtp"):
                if getattr(self, field) not in (None, False):
                    remedy = "it belongs to the adaptive method: leave it out, or leave out window, ngram and guesses"
                    raise ConfigError(field, getattr(self, field), remedy)
            return
        for name, default in (("window", WINDOW), ("ngram", NGRAM), ("guesses", GUESSES)):
            if given.get(name, default) != default:
                raise ConfigError(name, given[name], "the adaptive method has no sizes: leave it out, or adaptive=True")


Lookahead = LookaheadConfig | Literal["auto"] | None
"""What `lookahead=` takes: sizes, the defaults where they can be served, or plain decoding."""


def _require_int(field: str, value: object, least: int, most: int | None = None, note: str = "") -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value and (most is None or value <= most)
    if not fits:
        limit = "" if most is None else f" and <= {most}"
        raise ConfigError(field, value, f"give a whole number >= {least}{limit}{note}")
