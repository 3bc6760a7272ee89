"""`/v1/completions`: continuations of plain text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from lade.server.answer import Answer
from lade.server.choice_stream import Choice, CompletionLogprobs, EncodedPrompt, OldForm, Piece, tokens_of
from lade.server.errors import invalid
from lade.server.output_parser import PlainParser
from lade.server.request_context import ClientLeftError, Exchange
from lade.server.schemas import CompletionRequest
from lade.server.service import Service
from lade.server.settings import MOST_ECHOED
from lade.stats import Step


class CompletionAnswer(Answer):
    """Continuations of one or several prompts, ordered by prompt."""

    endpoint = "completions"
    kind, chunk_kind, id_prefix = "text_completion", "text_completion", "cmpl-"
    prompt_field = "prompt"
    body: CompletionRequest

    def __init__(self, service: Service, exchange: Exchange, body: CompletionRequest) -> None:
        super().__init__(service, exchange, body)
        self._logprobs = defaultdict[int, CompletionLogprobs](lambda: CompletionLogprobs(self.service.token_text))
        self._echoed: dict[int, OldForm] = {}

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

    def prompts(self) -> list[EncodedPrompt]:
        """See `Answer.prompts`."""
        if self.body.max_tokens == 0 and not self.body.echo:
            raise invalid("max_tokens", "max_tokens: 0 is for echo: ask for 1 at least")
        made = list[EncodedPrompt]()
        for each in self._given():
            if self.given_up:
                raise ClientLeftError
            made.append(self._prompt(each))
        if self._echoes_logprobs:
            self._check_echoed(sum(len(prompt.ids) for prompt in made))
        return made

    @property
    def _echoes_logprobs(self) -> bool:
        """True if the logprobs of prompts are echoed."""
        return self.body.echo and self.body.logprobs is not None

    def _check_echoed(self, tokens: int) -> None:
        """Refuse to echo the logprobs of `tokens` prompt tokens if they exceed the limit."""
        top = self.body.logprobs or 0
        if tokens * self.body.n * (top + 1) > MOST_ECHOED:
            why = f"prompt: {tokens} tokens with logprobs={top} and n={self.body.n} are too many to echo at a time"
            raise invalid("prompt", f"{why}: send fewer prompts, or ask for fewer logprobs")

    def _arguments(self, prompt: EncodedPrompt) -> dict[str, Any]:
        wanted = {"prompt_logprobs": self.body.logprobs} if self._echoes_logprobs else {}
        return {**super()._arguments(prompt), **wanted}

    async def _steps(self, silence_s: float | None) -> AsyncGenerator[tuple[Choice, Piece] | None]:
        async with aclosing(super()._steps(silence_s)) as steps:
            async for found in steps:
                if self._echoes_logprobs and found is not None and _is_first(*found):
                    await self.service.prepared(self._size, partial(self._echo, found[0]))
                yield found

    def _echo(self, choice: Choice) -> None:
        """Format the logprobs of a prompt. Called in a worker thread, since there may be many."""
        logprobs = self._logprobs[choice.index]
        others = [each for each in choice.handle.prompt_logprobs or () if each is not None]
        self._echoed[choice.index] = logprobs.of_prompt(choice.prompt.ids[0], choice.prompt.text, others)

    def _prompt(self, given: str | list[int]) -> EncodedPrompt:
        tokenizer = self.model.tokenizer
        if isinstance(given, list):
            if max(given) >= self.model.vocabulary:
                why = f"prompt: the id {max(given)} is out of the vocabulary: give ids below {self.model.vocabulary}"
                raise invalid("prompt", why)
            text = tokenizer.decode(given, skip_special_tokens=True) if self.body.echo else ""
            return EncodedPrompt(given, text=text)
        ids = self.service.encoder.ids(given)
        if not ids and tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id]
        return EncodedPrompt(ids, text=given)

    def parser(self, prompt: EncodedPrompt) -> PlainParser:
        """See `Answer.parser`."""
        return PlainParser()

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """See `Answer.whole_choice`."""
        echo = choice.prompt.text if self.body.echo else ""
        ids = {"prompt_token_ids": choice.prompt.ids, "token_ids": choice.tokens} if self.body.return_token_ids else {}
        return {
            "index": choice.index,
            "text": echo + choice.parts.content,
            "logprobs": self._told(choice, choice.steps, first=True),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **ids,
        }

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """See `Answer.opening`; echoed logprobs come with the first step instead."""
        echo = choice.prompt.text if self.body.echo and not self._echoes_logprobs else ""
        if not echo and not self.body.return_token_ids:
            return None
        ids = {"prompt_token_ids": choice.prompt.ids} if self.body.return_token_ids else {}
        return {"index": choice.index, "text": echo, "logprobs": None, "finish_reason": None, **ids}

    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """See `Answer.delta`."""
        first = _is_first(choice, piece)
        echo = choice.prompt.text if first and self._echoes_logprobs else ""
        return {
            "index": choice.index,
            "text": echo + piece.parts.content,
            "logprobs": None if piece.step is None else self._told(choice, [piece.step], first=first),
            "finish_reason": None,
            **({"token_ids": piece.tokens} if self.body.return_token_ids else {}),
        }

    def _told(self, choice: Choice, steps: Sequence[Step], *, first: bool) -> OldForm | None:
        """Return the logprobs of the next steps; those of an echoed prompt precede the first step's."""
        if self.body.logprobs is None:
            return None
        told = self._logprobs[choice.index].of(list(tokens_of(steps)))
        echoed = self._echoed.pop(choice.index, {}) if first else {}
        return {name: [*echoed.get(name, ()), *values] for name, values in told.items()}


def _is_first(choice: Choice, piece: Piece) -> bool:
    """Return True if a piece is from the first step of its choice."""
    return piece.step is not None and piece.step is choice.steps[0]
