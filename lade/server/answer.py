"""The answer to one request, from its queue slots to its last byte, independent of the API's format."""

from __future__ import annotations

import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar

from fastapi import Request
from starlette.responses import Response

from lade.backends.grammar.compiled import GrammarBudget
from lade.grammar import Grammar
from lade.server import schemas, serialization
from lade.server.choice_stream import Choice, EncodedPrompt, Piece, figures_of, predictions_of, usage_of
from lade.server.errors import TOO_LONG, ApiError, error_for, invalid
from lade.server.output_parser import MarkupParser, PlainParser
from lade.server.request_context import GONE, ClientLeftError, Exchange, unless_gone
from lade.server.sampling_parameters import first_seed, generate_arguments, lookahead_of, seed_of
from lade.server.schemas import BaseRequest, ChatRequest
from lade.server.serialization import Json, padded
from lade.server.served_model import TextTooLongError
from lade.server.service import Service
from lade.server.settings import MASK_SECONDS, MASK_TOKEN_SECONDS
from lade.server.structured_output import UntriedGrammarError, asked_form, refuse_other_ends
from lade.serving.handle import QueueSlot


class Answer(ABC):
    """The answer to one request; subclasses format it for one API.

    Args:
        service: the served state.
        exchange: the request context.
        body: the request body.
        asked: the body as its client has sent it, if that was to another API; None for `body`.

    Attributes:
        choices: the choices being generated; empty before that.
    """

    endpoint: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]
    prompt_field: ClassVar[str]
    field_names: ClassVar[Mapping[str, str]] = {}
    """Client-side names of fields of `body`, where they differ."""

    def __init__(
        self, service: Service, exchange: Exchange, body: BaseRequest, asked: BaseRequest | None = None
    ) -> None:
        self.service, self.body, self.asked = service, body, asked or body
        self._flight = service.fly(exchange, self.endpoint)
        self._request_id, self._owner, self._size = exchange.id, exchange.owner, exchange.size
        self._headers: dict[str, str] = {}
        self._id = f"{self.id_prefix}{secrets.token_hex(16)}"
        self._created = int(time.time())
        self.seed = first_seed(body)
        self.choices: list[Choice] = []
        self._predicted: list[int] | None = None
        self._masks = GrammarBudget(MASK_SECONDS, MASK_TOKEN_SECONDS)

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of choices."""

    @abstractmethod
    def prompts(self) -> list[EncodedPrompt]:
        """Return the prompts to continue. Called in a worker thread."""

    @abstractmethod
    def parser(self, prompt: EncodedPrompt) -> PlainParser | MarkupParser:
        """Return the parser of an answer to a prompt."""

    @abstractmethod
    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """Return a finished choice as JSON."""

    @abstractmethod
    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """Return the first chunk of a choice, before its first token; None for none."""

    @abstractmethod
    def delta(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """Return the chunk of a step."""

    @property
    def given_up(self) -> bool:
        """True if the client no longer waits."""
        return self._flight.outcome is not None

    def too_long(self, tokens: int, context: int, least: str = "") -> ApiError:
        """Return the error for a prompt that leaves no room for an answer, in the wording that clients parse.

        Args:
            tokens: length of the prompt in tokens.
            context: context length of the model in tokens.
            least: "at least " if `tokens` is a lower bound.
        """
        prompt = f"{least}{tokens} in the {self.prompt_field}"
        asked = f"you requested {least}{tokens + 1} tokens ({prompt}, at least 1 for the completion)"
        why = f"This model's maximum context length is {context} tokens. However, {asked}."
        return invalid(self.prompt_field, f"{why} Please reduce the length of the {self.prompt_field}.", TOO_LONG)

    @property
    def has_special_marks(self) -> bool:
        """True if the parser needs the text of special tokens."""
        return False

    def grammar(self, prompt: EncodedPrompt) -> tuple[Grammar, str] | None:
        """Return the grammar of an answer and the field that sets it; None if unconstrained.

        Raises:
            ApiError: the constraint cannot be served.
        """
        return asked_form(self.body)

    @property
    def top_logprobs(self) -> int | None:
        """Number of alternatives per token; None for no logprobs."""
        return None

    async def reply(self, request: Request) -> Response:
        """Return the response: whole, a stream, or an error."""
        try:
            await unless_gone(request, self._begin())
            if self.body.stream:
                return serialization.EventStream(self._events(), self._headers)
            return await unless_gone(request, self._whole())
        except ClientLeftError:
            return Response(status_code=GONE)
        except Exception as problem:  # noqa: BLE001 - whatever it is, the client is told
            return self._failed(problem).response()

    def _failed(self, problem: Exception) -> ApiError:
        error = error_for(self._flight.aborted or problem, self._request_id)
        self._flight.outcome = "error" if error.status == 500 else "rejected"
        return error

    async def _begin(self) -> None:
        """Reserve queue slots before any costly work, so that an overloaded server refuses at once."""
        self.model, self._engine = self.service.model, self.service.engine
        self._check()
        for _ in range(self.count):
            self._flight.places.append(self._engine.reserve())
        try:
            self.choices = await self.service.prepared(self._size, self._prepare)
        except UntriedGrammarError:  # before any choice has begun, as all of them have this grammar
            self.choices = await self.service.tried(self._owner, self._prepare)

    def _check(self) -> None:
        body, settings = self.body, self.service.settings
        schemas.check_model(body.model, settings)
        most = settings.max_rows + settings.max_waiting
        if self.count > most:
            why = f"{self.count} answers are asked for, and {most} may be decoded or wait: ask for fewer at a time"
            raise invalid(None, why, "too_large_for_server")
        ignored = schemas.check(body, settings) + schemas.without_effect(self.asked)
        if isinstance(body, ChatRequest):
            ignored += schemas.unused_by_template(body, self.model.chat_template)
        if ignored:
            self._headers["x-lade-ignored"] = schemas.header(self.field_names.get(name, name) for name in ignored)

    def _prepare(self) -> list[Choice]:
        """Render, tokenize and submit all choices. Called in a worker thread."""
        choices: list[Choice] = []
        self._predicted = self._prediction()
        places, context = iter(list(self._flight.places)), self.service.context or sys.maxsize
        try:
            prompts = self.prompts()
        except TextTooLongError as problem:
            raise self.too_long(problem.tokens, context, least="at least ") from None
        for prompt in prompts:
            prompt.check_ids(self.model.vocabulary)
            if len(prompt.ids) + (self.body.most_tokens != 0) > context:
                raise self.too_long(len(prompt.ids), context)
            for _ in range(self.body.n):
                choices.append(self._choice(len(choices), prompt, next(places)))
        return choices

    def _prediction(self) -> list[int] | None:
        """Return the ids of the predicted output, at most as many as the context holds."""
        if self.body.prediction is None:
            return None
        return self.service.encoder.first_ids(self.body.prediction.text)

    def _choice(self, index: int, prompt: EncodedPrompt, place: QueueSlot) -> Choice:
        seed = seed_of(self.seed, index % self.body.n)
        handle = self._engine.add(prompt.ids, place=place, seed=seed, **self._arguments(prompt), **prompt.media)
        return Choice(
            index=index,
            prompt=prompt,
            handle=handle,
            parser=self.parser(prompt),
            stop_token_ids=frozenset(self.body.stop_token_ids or ()),
            silent=self.body.most_tokens == 0,
        )

    def _arguments(self, prompt: EncodedPrompt) -> dict[str, Any]:
        """Return the arguments of `Engine.add` for a prompt."""
        body, settings = self.body, self.service.settings
        memories = self.service.memories
        scope = memories.scope(self._owner, body.cache_salt)
        wanted = settings.answer_tokens if body.most_tokens is None else body.most_tokens
        context = self.service.context
        room = max(1, wanted if context is None else min(wanted, context - len(prompt.ids)))
        least = min(body.min_tokens, room)
        arguments = generate_arguments(body, self.model, len(prompt.ids))
        if (asked := self.grammar(prompt)) is not None:
            refuse_other_ends(body, asked[1])
            with self.service.metrics.compiling():
                arguments.setdefault("logits_processor", []).append(self.service.forms.processor(*asked, self._masks))
        return {
            **arguments,
            "stop_texts": body.stop,
            "tokenizer": self.model.tokenizer,
            "skip_special_tokens": body.skip_special_tokens and not self.has_special_marks,
            "logprobs": self.top_logprobs,
            "scope": scope,
            "client": self._owner,
            **({"min_new_tokens": least} if least else {}),
            "max_new_tokens": room,
            "prediction": self._predicted,
            "lookahead": memories.lookahead(lookahead_of(body.lookahead), scope),
        }

    async def _steps(self, silence_s: float | None) -> AsyncGenerator[tuple[Choice, Piece] | None]:
        """Yield choices with their new pieces as they arrive; None after `silence_s` seconds of silence."""
        answers = [aiter(choice.handle) for choice in self.choices]
        async with aclosing(serialization.interleaved(answers, silence_s)) as steps:
            async for found in steps:
                if found is None:
                    yield None
                    continue
                number, step = found
                choice = self.choices[number]
                if step is not None:
                    self._flight.saw_token()
                yield choice, choice.finish() if step is None else choice.take(step)

    async def _whole(self) -> Response:
        async for _ in self._steps(None):
            pass
        self.ended()
        if self.top_logprobs is None:
            return self._answered()
        return await self.service.prepared(self._size, self._answered)  # all tokens, each with its likeliest ones

    def _answered(self) -> Response:
        """Return the whole answer."""
        told = {
            **self._head(self.kind),
            "choices": [self.whole_choice(choice) for choice in self.choices],
            "usage": self.usage(),
            "lade": figures_of(self.choices),
        }
        return Json(told, headers=self._headers)

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield the encoded events of a stream."""
        begun = False
        try:
            async with aclosing(self._steps(self.service.settings.ping_s)) as pieces:
                async for found in pieces:
                    if found is None:
                        yield self.ping()
                        continue
                    for event in (*(() if begun else self._first()), *self._chunks(*found)):
                        yield event
                    begun = True
            self.ended()
            for event in self._last():
                yield event
        except Exception as problem:  # noqa: BLE001 - the status was sent: only an event can tell
            for event in self._broken(self._failed(problem)):
                yield event

    def ping(self) -> bytes:
        """Return the event sent after a while of silence."""
        return serialization.PING

    def _first(self) -> Iterator[bytes]:
        """Yield the events before the first token."""
        return map(self._event, filter(None, map(self.opening, self.choices)))

    def _last(self) -> Iterator[bytes]:
        """Yield the events after the last token."""
        if self.body.include_usage:
            yield serialization.event({**self._head(self.chunk_kind), "choices": [], "usage": self.usage()})
        yield serialization.DONE

    def _broken(self, error: ApiError) -> Iterator[bytes]:
        """Yield the events that end a failed stream."""
        yield serialization.event(error.body)

    def _chunks(self, choice: Choice, piece: Piece) -> Iterator[bytes]:
        """Yield the events of a step or of the end of a choice: held-back text, then the finish reason."""
        if piece.step is not None:
            yield self._event(self.delta(choice, piece), self._trace(piece))
            return
        if piece.parts:
            yield self._event(self.delta(choice, piece))
        end = {**self.delta(choice, Piece(parts=type(piece.parts)())), "finish_reason": choice.finish_reason}
        if choice.stop_reason is not None:
            end["stop_reason"] = choice.stop_reason
        yield self._event(end, {"lade": choice.figures})

    def _event(self, choice: dict[str, Any], others: dict[str, Any] | None = None) -> bytes:
        usage: dict[str, Any] = {}
        options = self.body.stream_options
        if options is not None and options.include_usage:
            usage = {"usage": self.usage() if options.continuous_usage_stats else None}
        value = {**self._head(self.chunk_kind), "choices": [choice], **usage, **(others or {})}
        return serialization.event(padded(value) if options is not None and options.include_obfuscation else value)

    def _trace(self, piece: Piece) -> dict[str, Any]:
        step = piece.step
        if step is None or not self.body.lade.trace:
            return {}
        return {"lade": {"tokens": step.tokens, "texts": piece.texts, "sources": step.sources, "fed": step.fed}}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.service.settings.name,
            "system_fingerprint": self.service.fingerprint,
        }

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        return usage_of(self.choices, self.body.n, self._predicted)

    def ended(self) -> None:
        """Record how the choices have ended."""
        self._flight.outcome = self.choices[0].finish_reason
        self._flight.predictions = predictions_of(self.choices, self._predicted)
