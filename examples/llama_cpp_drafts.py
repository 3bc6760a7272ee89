"""Drafts for llama-cpp-python, whose `Llama` feeds what its `draft_model` proposes and keeps what it agrees with.

    llm = Llama("model.gguf", n_ctx=4096, logits_all=True)
    llm.draft_model = DraftModel(llm)

It pays where a pass over a few tokens takes little longer than one over a single token: with bfloat16 weights, not with
most quantised ones (docs/engines.md). Without a price given it goes by the times of passes, and never down to nothing.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lade.engines.drafter import EngineDrafter
from lade.errors import ConfigError
from lade.memory import Memory

_TEXT = "text"  # a `Llama` has one text at a time


class DraftModel:
    """A `draft_model` of one `Llama`; called with the ids of a text, it returns some that may follow.

    Args:
        llama: a `llama_cpp.Llama` made with `logits_all=True`: its `scores` are read.
        most: the most tokens to draft.
        memory: what texts learn from; None for a new one.
        price: see `lade.EngineDrafter`; None to go by the time between calls.

    Raises:
        ConfigError: `llama` keeps the logits of its last tokens alone, or another argument is out of range.
    """

    def __init__(self, llama: Any, *, most: int = 4, memory: Memory | None = None, price: float | None = None) -> None:
        if len(llama.scores) < llama.n_ctx():
            raise ConfigError("logits_all", False, "make the Llama with logits_all=True, so that it keeps all logits")
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ConfigError("most", most, "give a number of tokens, at least 1")
        self._llama, self._most = llama, most
        self.drafter = EngineDrafter(llama.n_vocab(), [llama.token_eos()], memory=memory, price=price)
        self._drafted, self._started = 0, perf_counter()

    def __call__(self, input_ids: npt.NDArray[np.intc], /, **_kwargs: Any) -> npt.NDArray[np.intc]:
        """Learn from the pass over the last draft, and draft anew.

        Args:
            input_ids: `[T]` ids of the text.

        Returns:
            `[<= most]` ids that may follow.
        """
        started, drafter, text = self._started, self.drafter, input_ids.tolist()
        self._started = perf_counter()
        known = drafter.text(_TEXT) if _TEXT in drafter else []
        new = text[len(known) :]
        if known and 1 <= len(new) <= 1 + self._drafted and text[: len(known)] == known:
            fed = slice(len(known) - 1, len(known) + self._drafted)
            drafter.learn(_TEXT, new, drafter.read_rows(torch.from_numpy(self._llama.scores[fed])))
            drafter.observe(1 + self._drafted, len(new), self._started - started)
        else:
            if known:
                drafter.end(_TEXT)
            drafter.begin(_TEXT, text)
        (draft,) = drafter.propose([_TEXT], self._most)
        self._drafted = len(draft)
        return np.array(draft.ids, np.intc)
