"""A request that has been seated."""

from __future__ import annotations

from dataclasses import dataclass, field

from lade.decoding.row import Row
from lade.model.kv_cache import TreeCache
from lade.model.prompt_logits import PromptLogprobs
from lade.serving.capacity import Need
from lade.serving.handle import Handle
from lade.serving.request import Request


@dataclass(eq=False)
class ActiveRequest:
    """A request that is being prefilled or decoded, or that had to make room for older ones and goes on later.

    Attributes:
        request: the prompt and its arguments.
        handle: gets the steps and the result.
        number: in the order in which requests were seated.
        row: writes the answer; made when prefill begins.
        cache: keys and values of its text, until the row joins the batch.
        fed: tokens of its text that the cache holds.
        seconds: seconds that prefill has taken.
        cancelled: whether to evict it before the next step.
        pinned: whether it cannot make room for others: an image is not fed again.
    """

    request: Request
    handle: Handle
    number: int
    row: Row | None = None
    cache: TreeCache = field(default_factory=TreeCache)
    fed: int = 0
    seconds: float = 0.0
    cancelled: bool = False
    pinned: bool = field(init=False)

    def __post_init__(self) -> None:
        self.pinned = self.request.images is not None

    @property
    def text(self) -> list[int]:
        """What has to be fed before it can join the batch: the prompt; of an answer that goes on, all but the root."""
        if self.row is None:
            return self.request.ids
        return self.row.tokens[:-1] if self.row.written else self.row.tokens

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """What takes in how likely the tokens of its text are, where that is wanted and not known yet."""
        return None if self.row is not None and self.row.written else self.request.prompt_logprobs

    @property
    def tokens(self) -> int:
        """Of its text, the root included, once it is decoded."""
        return self.request.prompt_tokens + (len(self.row.written) or 1 if self.row is not None else 1)

    def need(self, spare: int) -> Need:
        """The room that it takes if it grows by so many tokens more."""
        return self.request.need if self.pinned else self.request.need.limited(self.tokens + spare)

    def start_over(self) -> None:
        """Have its text fed again, which may have an answer in it."""
        self.cache, self.fed = TreeCache(), 0
        if self.row is not None and not self.row.written:
            self.row, self.handle.cached_tokens = None, 0
