"""A conversation and its KV cache: each turn feeds only what the cache does not hold yet."""

from __future__ import annotations

from typing import Any

from lade.cli.decoding import Generation
from lade.cli.loading import Subject
from lade.errors import InputError
from lade.model.cache import TreeCache
from lade.model.support import supports


class Conversation:
    """The turns so far as token ids, and as messages where the model has a chat template.

    With a template every turn is templated anew and what its ids have in common with the cache is kept. Without one the
    turns are one text that the model continues.

    Args:
        subject: who answers.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.templated = bool(getattr(subject.tokenizer, "chat_template", None))
        self._caches = bool(supports(subject.model))
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self._messages: list[dict[str, str]] = []
        self._ids: list[int] = []
        self.cache: TreeCache | None = TreeCache() if self._caches else None

    @property
    def tokens(self) -> int:
        """Length of the conversation."""
        return len(self._ids)

    @property
    def cached(self) -> int:
        """How many of its tokens the cache holds."""
        return 0 if self.cache is None else self.cache.get_seq_length()

    def ask(self, text: str) -> list[int]:
        """Ids of the conversation with the user's next turn; the cache is cropped to what it shares with them.

        Nothing else changes before `answered`, so that a turn which cannot be answered is as if never said.

        Raises:
            InputError: it does not fit into the model's context.
        """
        ids = self._templated(text) if self.templated else self._continued(text)
        context = self._subject.context
        if context and len(ids) >= context:
            raise InputError(
                f"with this turn the conversation has {len(ids)} tokens, and the model's context holds {context}: "
                "say something shorter, or start anew with /reset"
            )
        self._subject.check(ids)
        self._crop(ids)
        return ids

    def answered(self, text: str, prompt: list[int], answer: Generation) -> None:
        """Take a turn and its answer, finished or not, into the conversation."""
        self._ids = [*prompt, *answer.token_ids]
        reply = self._subject.tokenizer.decode(answer.token_ids, skip_special_tokens=True).strip()
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": reply}]
        if answer.torn and self._caches:
            self.cache = TreeCache()  # a pass was broken off: its layers may disagree

    def _templated(self, text: str) -> list[int]:
        messages = [*self._messages, {"role": "user", "content": text}]
        try:
            ids: list[int] = self._subject.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as problem:
            raise InputError(f"the model's chat template refuses this turn ({problem}): try /reset") from problem
        return ids

    def _continued(self, text: str) -> list[int]:
        tokenizer = self._subject.tokenizer
        if not self._ids:
            first: list[int] = tokenizer(text)["input_ids"]
            return first
        before = self._ids[:-1] if self._ids[-1] in _stop_ids(self._subject.model) else self._ids
        return [*before, *tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _crop(self, ids: list[int]) -> None:
        """Leave in the cache what `ids` begins with, but for the last token: one must be left to feed."""
        if self.cache is None:
            return
        shared = next(
            (i for i, (old, new) in enumerate(zip(self._ids, ids, strict=False)) if old != new), len(self._ids)
        )
        # A plain decoder that was stopped may have cached a token that nobody saw: it lies behind `_ids`, and goes.
        keep = min(shared, len(ids) - 1)
        if self.cached > keep:
            self.cache.crop(keep - self.cached)


def _stop_ids(model: Any) -> set[int]:
    eos = model.generation_config.eos_token_id
    return set(eos if isinstance(eos, list) else [] if eos is None else [eos])
