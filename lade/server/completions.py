"""`/v1/completions`: text that is continued, as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lade.server.answer import Answer
from lade.server.choice import Choice, Piece
from lade.server.errors import invalid, unsupported
from lade.server.exchange import Exchange
from lade.server.leaving import ClientLeftError
from lade.server.logprobs import tokens_of
from lade.server.message_parts import PlainParser
from lade.server.prompt import Prompt
from lade.server.schemas import CompletionRequest
from lade.server.service import Service
from lade.server.token_text import TextOffsets, finite
from lade.stats import Step


class CompletionAnswer(Answer):
    """Continuations of one or several prompts, all of the first one before those of the second."""

    endpoint = "completions"
    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl-"
    prompt_field = "prompt"
    body: CompletionRequest

    def __init__(self, service: Service, exchange: Exchange, body: CompletionRequest) -> None:
        super().__init__(service, exchange, body)
        self._offsets: dict[int, TextOffsets] = {}  # by the indices of choices

    @property
    def count(self) -> int:
        """See `Answer.count`."""
        return self.body.n * len(self._given())

    @property
    def top_logprobs(self) -> int | None:
        """See `Answer.top_logprobs`."""
        return self.body.logprobs

    def _given(self) -> list[str] | list[list[int]]:
        prompt: Any = self.body.prompt
        several: list[Any] = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
        return several

    def prompts(self) -> list[Prompt]:
        """See `Answer.prompts`."""
        if self.body.echo and self.body.logprobs is not None:
            raise unsupported("echo", "echo: only tokens of answers have logprobs: leave out one of the two")
        made = []
        for each in self._given():
            if self.given_up:
                raise ClientLeftError
            made.append(self._prompt(each))
        return made

    def _prompt(self, given: str | list[int]) -> Prompt:
        tokenizer = self.model.tokenizer
        if isinstance(given, list):
            if max(given) >= self.model.vocabulary:
                why = f"prompt: the id {max(given)} is out of the vocabulary: give ids below {self.model.vocabulary}"
                raise invalid("prompt", why)
            text = tokenizer.decode(given, skip_special_tokens=True) if self.body.echo else ""
            return Prompt(given, text=text)
        ids = self.service.encoder.ids(given)
        if not ids and tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id]
        return Prompt(ids, text=given)

    def parser(self, prompt: Prompt) -> PlainParser:
        """See `Answer.parser`."""
        return PlainParser()

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """See `Answer.whole_choice`."""
        echo = choice.prompt.text if self.body.echo else ""
        ids = {"prompt_token_ids": choice.prompt.ids, "token_ids": choice.tokens} if self.body.return_token_ids else {}
        return {
            "index": choice.index,
            "text": echo + choice.parts.content,
            "logprobs": self._logprobs(choice.steps, choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **ids,
        }

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """See `Answer.opening`."""
        if not self.body.echo and not self.body.return_token_ids:
            return None
        text = choice.prompt.text if self.body.echo else ""
        ids = {"prompt_token_ids": choice.prompt.ids} if self.body.return_token_ids else {}
        return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None, **ids}

    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """See `Answer.delta`."""
        steps = [] if piece.step is None else [piece.step]
        return {
            "index": choice.index,
            "text": piece.parts.content,
            "logprobs": self._logprobs(steps, choice) if steps else None,
            "finish_reason": None,
            **({"token_ids": piece.tokens} if self.body.return_token_ids else {}),
        }

    def _logprobs(self, steps: Sequence[Step], choice: Choice) -> dict[str, Any] | None:
        """Of some steps, all or the last one, in the form of the old API."""
        if self.body.logprobs is None:
            return None
        spelling, found = self.service.token_text, list(tokens_of(steps))
        offsets = self._offsets.setdefault(choice.index, TextOffsets(spelling))
        return {
            "tokens": [spelling.text(each.token) for each in found],
            "token_logprobs": [finite(each.logprob) for each in found],
            "top_logprobs": [{spelling.text(token): finite(value) for token, value in each.top} for each in found],
            "text_offset": offsets.take(each.token for each in found),
        }
