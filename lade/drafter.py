"""`lade.Drafter`: propose tokens of your own, which every generation verifies beside the library's drafts.

A drafter changes the speed, never a token: whatever it proposes, only tokens that the model itself chooses are emitted.

>>> class Repeat(lade.Drafter):
...     def propose(self, request, tokens, most):
...         return [tokens[-8:]]
>>> lade.generate(model, **inputs, lookahead=lade.LookaheadConfig(sources=[Repeat()]))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple


class Continuation(NamedTuple):
    """Tokens that may come next, with the confidence of whoever proposes them.

    Attributes:
        tokens: `[T]` ids, the next token first.
        probabilities: `[T]`, for each token the probability that it is right if all before it are. They are calibrated
            by the tokens that come, so they need not be exact.
    """

    tokens: Sequence[int]
    probabilities: Sequence[float]


class Drafter(ABC):
    """Base class of drafters for `LookaheadConfig(sources=[...])`; only `propose` must be written.

    One drafter serves all texts that are generated with its config: the rows of a batch and the requests of an engine
    alternate, and calls from several threads overlap. So state that belongs to one text is kept by its `request`.

    An exception raised by any method except `end`, or a proposal that is not made of token ids of the model, ends the
    text with a `DrafterError`; other texts of an engine go on. An exception raised by `end` is logged.

    `lade.peers` has drafters to use or to start from.

    Attributes:
        name: name of the proposed tokens in `Step.sources`; by default that of the class.
        continuations: how many continuations of a proposal are taken. A tree is proposed as its paths, one per leaf.
    """

    name: str = ""
    continuations: int = 8
    _draws = True  # may draw from the generators of the process, whose states are then kept apart

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Name the drafter after its class."""
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def begin(self, request: Hashable, prompt: Sequence[int]) -> None:  # noqa: B027 - optional
        """Begin a text.

        Args:
            request: identifies the text in all later calls.
            prompt: `[L]` ids, without padding. In encoder-decoder models the decoder's.
        """

    @abstractmethod
    def propose(
        self, request: Hashable, tokens: Sequence[int], most: int
    ) -> Iterable[Sequence[int] | Continuation] | None:
        """Propose continuations.

        Args:
            request: identifies the text.
            tokens: `[P]` ids of prompt and answer so far, and of tokens that a grammar forces next.
            most: maximum length of a continuation; longer ones are cut.

        Returns:
            Continuations, the likeliest first, each a sequence of token ids or a `Continuation`; more than
            `continuations` are ignored. Empty or None if there is nothing to propose. Without probabilities, the tokens
            are rated by how many of the earlier proposals were right.
        """

    def learn(self, request: Hashable, tokens: Sequence[int]) -> None:  # noqa: B027 - optional
        """Learn tokens of the answer, `[T]`, in order; each is passed once."""

    def observe_prompt(  # noqa: B027 - optional
        self, request: Hashable, tokens: Sequence[int], likely: Sequence[Sequence[int]]
    ) -> None:
        """Observe the model's predictions in the prompt. Where this is overridden, prefill computes them.

        Args:
            request: identifies the text, as in `begin`.
            tokens: `[T]` ids of the prompt, or of a part of it; what an engine's prefix cache skips is left out.
            likely: `[T]`, ids that may follow each token, up to 6, the likeliest first.
        """

    def observe(  # noqa: B027 - optional
        self, request: Hashable, tokens: Sequence[int], parents: Sequence[int], likely: Sequence[Sequence[int]]
    ) -> None:
        """Observe the model's predictions of one forward pass, after `learn` has got the accepted tokens.

        Args:
            request: identifies the text, as in `begin`.
            tokens: `[S]` ids of the fed tree, whoever proposed them; first the last token before it.
            parents: `[S]`, index of each token's parent in the tree; -1 for the first.
            likely: `[S]`, ids that may follow each token, up to 6, the likeliest first.
        """

    def end(self, request: Hashable) -> None:  # noqa: B027 - optional
        """End a text, which was finished, stopped or cancelled. Called once for each `begin`."""
