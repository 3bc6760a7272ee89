"""`LookaheadConfig`: user-facing settings of lookahead decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from lade.errors import ConfigError, whole_number
from lade.native import COMPILER_REMEDY, library

if TYPE_CHECKING:
    from lade.drafter import Drafter

MOST_COLUMNS, MOST_NGRAM, MOST_BUDGET = 256, 32, 1024
"""Upper bounds: several times the sizes that pay on any hardware, yet small enough for a step to finish."""
SIZES = {"window": 7, "ngram": 5, "guesses": 7}
"""Defaults of the paper for models of about 7B parameters."""
POOL_ALONE = {"window": 0, "ngram": 5, "guesses": 3}
"""Defaults where the compiled kernels are missing: a step of few tokens, which pays on a CPU, too."""
_UNSET: Any = None  # replaced in `__post_init__`, which tells explicit values from defaults


class BaseMemory:
    """Base class of `lade.Memory`, so that a config can check for one without importing it."""


@dataclass(frozen=True)
class Method:
    """The method of a `LookaheadConfig`: what it needs, and what it decides."""

    name: Literal["adaptive", "lookahead", "sources"]  # the second is the paper's; the third drafts by sources alone
    sizes_trees: bool = False  # the cost of passes decides on the sizes of trees
    wants_mtp: bool = False  # MTP layers are used where they can be: if asked for, or if their cost decides
    lacks_memory: bool = False  # it drafts from a memory, and none is given
    copies_text: bool = False  # continuations of the row's own text are verified beside its drafts


@dataclass(frozen=True)
class LookaheadConfig:
    """How to draft. Without arguments: the adaptive method, which needs no tuning.

    Explicit `window`, `ngram` or `guesses` select the fixed method of the paper (arXiv 2402.02057) at exactly these
    sizes. Where the compiled kernels are missing, the default is the paper's n-gram pool alone, with three guesses a
    step.

    Args:
        window: W, columns of the lookahead window; 0 disables the lookahead branch. At most 256; default 7.
        ngram: N, length of the n-grams; the window has N - 1 rows. From 2 to 32; default 5.
        guesses: G, n-grams kept per token in the pool and verified in one step; 0 disables the pool. At most 256;
            default 7.
        prompt_ngrams: whether n-grams of the prompt and of the accepted text enter the pool too.
        adaptive: choose at each step the tree with the most expected tokens per second on this machine, plain decoding
            included. Default: true unless a size is given. False selects the paper's method.
        budget: fixed number of tokens fed per step, root included, in place of the adaptive choice. An upper bound: a
            step feeds fewer if there are fewer candidates. From 1 to 1024.
        memory: a `lade.Memory` that the adaptive method reads and fills; None for one that ends with the request.
        mtp: draft with the multi-token prediction (MTP) layers of the checkpoint, too: None where they are found and
            pay, which nothing tells with a `budget`; False nowhere; True to raise where they cannot be used.
        sources: drafters of your own, or of others, see `lade.Drafter` and `lade.peers`. Their drafts are verified
            beside the method's; with the paper's method they come before those of the pool.
        only: draft with the `sources` alone, and feed what they propose: up to 128 tokens a step, the root included.
        seed: seeds the private generator of the window's first tokens. It changes the drafts, hence the speed, never
            the output; torch's global generator is not touched.

    Raises:
        ConfigError: a field is out of range, or two contradict each other; the message names field, value and remedy.

    >>> LookaheadConfig(window=15, ngram=5, guesses=15).adaptive
    False
    >>> LookaheadConfig(budget=32).adaptive
    True
    """

    window: int = _UNSET
    ngram: int = _UNSET
    guesses: int = _UNSET
    prompt_ngrams: bool = True
    adaptive: bool = _UNSET
    budget: int | None = None
    memory: BaseMemory | None = None
    seed: int = 0
    mtp: bool | None = None
    sources: Sequence[Drafter] = ()
    only: bool = False

    def __post_init__(self) -> None:
        given = {name: size for name in SIZES if (size := getattr(self, name)) is not None}
        resolved = {**SIZES, **given}
        if self.adaptive is None:
            if self.only is True and given:  # a copy by `replace` has them too, but not without `adaptive`
                raise ConfigError(*next(iter(given.items())), _ALONE)
            resolved["adaptive"] = False
            if not given and self.only is not True:
                resolved |= POOL_ALONE if library() is None else {"adaptive": True}
        for name, value in {**resolved, "sources": _drafters(self.sources)}.items():
            object.__setattr__(self, name, value)
        self._check_types()
        self._check_method()

    @cached_property
    def method(self) -> Method:
        """The method that these settings select."""
        if not self.adaptive:
            return Method("sources" if self.only else "lookahead")
        by_cost = self.budget is None
        return Method(
            "adaptive",
            sizes_trees=by_cost,
            wants_mtp=by_cost if self.mtp is None else self.mtp,
            lacks_memory=self.memory is None,
            copies_text=self.prompt_ngrams,
        )

    def _check_types(self) -> None:
        whole_number("window", self.window, 0, MOST_COLUMNS, note=" (0 switches the window off)")
        whole_number("ngram", self.ngram, 2, MOST_NGRAM)
        whole_number("guesses", self.guesses, 0, MOST_COLUMNS, note=" (0 switches the pool off)")
        whole_number("seed", self.seed, 0)
        if self.budget is not None:
            whole_number("budget", self.budget, 1, MOST_BUDGET, note=" (1 decodes plainly), or None")
        for field in ("prompt_ngrams", "adaptive", "only"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(field, getattr(self, field), "give True or False")
        if self.mtp is not None and not isinstance(self.mtp, bool):
            raise ConfigError("mtp", self.mtp, "give True, False, or None to use MTP layers where they pay")
        if self.memory is not None and not isinstance(self.memory, BaseMemory):
            raise ConfigError("memory", self.memory, "give a lade.Memory, or None")

    def _check_method(self) -> None:
        if self.only:
            self._check_only()
        if not self.adaptive:
            for field in ("budget", "memory", "mtp"):
                if getattr(self, field) not in (None, False):
                    remedy = ": leave it out, or leave out window, ngram and guesses"
                    if library() is None:
                        remedy = f", which needs the compiled kernels: {COMPILER_REMEDY}"
                    raise ConfigError(field, getattr(self, field), f"it belongs to the adaptive method{remedy}")
            return
        if library() is None:
            raise ConfigError("adaptive", True, f"the compiled kernels are missing: {COMPILER_REMEDY}")
        for name, default in SIZES.items():
            if (size := getattr(self, name)) != default:
                raise ConfigError(name, size, "the adaptive method has no sizes: leave it out, or adaptive=True")

    def _check_only(self) -> None:
        if not self.sources:
            raise ConfigError("only", True, "only=True leaves nothing that drafts: give sources too, or leave it out")
        others = {"prompt_ngrams": True, "seed": 0, "adaptive": False, "budget": None, "memory": None, "mtp": False}
        for field, unused in {**SIZES, **others}.items():
            if getattr(self, field) not in (unused, None):
                raise ConfigError(field, getattr(self, field), _ALONE)


_ALONE = "with only=True the sources draft alone: leave it out, or leave out only=True"


Lookahead = LookaheadConfig | Literal["auto"] | None
"""The argument `lookahead=`: settings, "auto" for the defaults wherever they can be served, None for plain decoding."""


STEP_SOURCES = frozenset(
    ("prefill", "window", "pool", "prompt", "text", "memory", "prediction", "mtp", "grammar", "bonus", "beam")
)
"""Names in `Step.sources` that the library uses itself."""


def _drafters(sources: object) -> tuple[Drafter, ...]:
    """Return the drafters of `sources=`; raise `ConfigError` for one that cannot be asked."""
    if not isinstance(sources, Sequence) or isinstance(sources, str):
        raise ConfigError("sources", sources, "give a list of lade.Drafter objects")
    for each in sources:
        if isinstance(each, type):
            raise ConfigError("sources", sources, f"give an object, {each.__name__}(...), and not its class")
        if not all(callable(getattr(each, method, None)) for method in ("begin", "propose", "learn", "end")):
            raise ConfigError("sources", sources, "give objects of subclasses of lade.Drafter")
        name = getattr(each, "name", None)
        if not isinstance(name, str) or not name or name in STEP_SOURCES:
            raise ConfigError("sources", sources, f"the name {name!r} is reserved: give the drafter another name")
        whole_number("continuations", getattr(each, "continuations", 8), 1)
    return tuple(sources)


def resolve(lookahead: Lookahead) -> tuple[LookaheadConfig | None, bool]:
    """Return the config of `lookahead=`, and whether to decode plainly where it is not supported; None is always plain.

    Raises:
        ConfigError: it is neither a `LookaheadConfig` nor "auto" nor None.
    """
    if lookahead is None or isinstance(lookahead, LookaheadConfig):
        return lookahead, False
    if lookahead == "auto":
        return LookaheadConfig(), True
    raise ConfigError("lookahead", lookahead, 'give a LookaheadConfig, "auto", or None for plain decoding')
