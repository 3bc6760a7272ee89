"""The answer stream: one request from its queue slots to its last byte.

A `Preprocessor` converts the request body to engine inputs, `Answer` submits them and collects the tokens, and a
`Formatter` writes the answer in the format of one API.
"""

from __future__ import annotations

import asyncio
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from functools import cached_property, partial
from typing import Any, ClassVar

from fastapi import Request
from starlette.responses import Response, StreamingResponse

from lade.grammar import Grammar
from lade.server import schemas, serialization
from lade.server.choice import Choice, ChoiceDelta, EncodedPrompt, RequestOutput
from lade.server.errors import TIMEOUT, ApiError, error_for, invalid, too_long
from lade.server.keys import NO_LIMITS
from lade.server.output_parser import MarkupParser, PlainParser
from lade.server.request_context import ClientDisconnectedError, RequestContext, timeout_of
from lade.server.sampling_parameters import SEEDS, generate_arguments, lookahead_of
from lade.server.schemas import BaseRequest, ChatRequest
from lade.server.serialization import STREAM_HEADERS, Json
from lade.server.service import Service, Serving
from lade.server.settings import MASK_SECONDS, MASK_TOKEN_SECONDS
from lade.server.structured_output import check_ends, requested_grammar
from lade.serving.request import GrammarCompiler, UntriedGrammarError, serving_client


class Preprocessor(ABC):
    """Converts a request body to inputs of the engine."""

    body: BaseRequest
    parses_markup = False  # True if answers have the markup of messages, whose tags may be special tokens
    prompt_count = 1
    top_logprobs: int | None = None  # number of alternatives per token of the answer; None for no logprobs
    prompt_logprobs: int | None = None  # the same for the prompt

    @abstractmethod
    def prompts(self, serving: Serving) -> Iterable[EncodedPrompt]:
        """Yield the prompts to continue, in a worker thread; raise `ApiError` for an invalid one."""

    def parser(self, prompt: EncodedPrompt, serving: Serving) -> PlainParser | MarkupParser:
        """Return the parser of an answer to a prompt."""
        return PlainParser()

    def grammar(self, prompt: EncodedPrompt, serving: Serving) -> tuple[Grammar, str] | None:
        """Return an answer's grammar and the field that sets it, or None; raise `ApiError` for a wrong one."""
        return requested_grammar(self.body)


class Formatter(ABC):
    """Writes an answer in the format of one API."""

    endpoint: ClassVar[str]
    prompt_field: ClassVar[str] = "messages"
    field_names: ClassVar[Mapping[str, str]] = {}
    """Names of fields in this API, by their names in the body that was validated, where they differ."""

    def __init__(self, output: RequestOutput) -> None:
        self.output = output

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""

    @abstractmethod
    def first(self) -> Iterator[bytes]:
        """Yield the events before the first token."""

    @abstractmethod
    def step(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        """Yield the events of a step, or of the end of a choice."""

    @abstractmethod
    def last(self) -> Iterator[bytes]:
        """Yield the events after the last token."""

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """Yield the events that end a failed stream."""
        yield serialization.event(error.body)

    def ping(self) -> bytes:
        """Return the event sent after `Settings.ping_s` seconds of silence."""
        return serialization.PING

    def too_long(self, tokens: int, context: int) -> ApiError:
        """Return the error for a prompt of so many tokens that there is no room for an answer, as clients parse it."""
        prompt = f"{tokens} in the {self.prompt_field}"
        asked = f"you requested {tokens + 1} tokens ({prompt}, at least 1 for the completion)"
        why = f"This model's maximum context length is {context} tokens. However, {asked}."
        return too_long(self.prompt_field, f"{why} Please reduce the length of the {self.prompt_field}.")


class ChunkFormatter(Formatter):
    """Writes an answer in the envelopes of OpenAI's completions APIs: a whole answer, or a stream of chunks."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]  # `object` of a whole answer
    chunk_kind: ClassVar[str]  # `object` of a chunk

    @abstractmethod
    def message(self, choice: Choice) -> dict[str, Any]:
        """Return the members of a whole choice that have its text and its logprobs."""

    @abstractmethod
    def increment(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the same members of a part of a choice."""

    def _choice(self, choice: Choice) -> dict[str, Any]:
        ends = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return {"index": choice.index, **self.message(choice), **ends, **self._ids(choice.tokens)}

    def _delta(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        made = self.increment(choice, delta)
        return {"index": choice.index, **made, "finish_reason": None, **self._ids(delta.tokens)}

    def prompt_ids(self, choice: Choice) -> dict[str, Any]:
        """Return the ids of the prompt, if they are wanted."""
        return {"prompt_token_ids": choice.prompt.ids} if self.output.body.return_token_ids else {}

    def _ids(self, tokens: list[int]) -> dict[str, Any]:
        return {"token_ids": tokens} if self.output.body.return_token_ids else {}

    def whole(self) -> dict[str, Any]:
        """See `Formatter.whole`."""
        output = self.output
        own = {"choices": list(map(self._choice, output.choices)), "usage": output.usage(), "lade": output.figures()}
        return {**self._head(self.kind), **own, **output.metrics()}

    def chunk(self, choice: dict[str, Any], **more: Any) -> bytes:
        """Return the event of a choice's increment."""
        usage, options = dict[str, Any](), self.output.body.stream_options
        if options is not None and options.include_usage:
            usage = {"usage": self.output.usage() if options.continuous_usage_stats else None}
        value = {**self._chunk_head, "choices": [choice], **usage, **more}
        padded = options is not None and options.include_obfuscation
        return serialization.event(serialization.padded(value) if padded else value)

    def step(self, choice: Choice, delta: ChoiceDelta) -> Iterator[bytes]:
        """See `Formatter.step`: at the end of a choice held-back text, then the finish reason."""
        if (step := delta.step) is not None:
            trace: dict[str, Any] = {}  # this server's own extension
            if self.output.body.lade.trace:
                members = {"tokens": step.tokens, "texts": delta.texts, "sources": step.sources, "fed": step.fed}
                trace = {"lade": members}
            yield self.chunk(self._delta(choice, delta), **trace)
            return
        if delta.parts:
            yield self.chunk(self._delta(choice, delta))
        end = {**self._delta(choice, ChoiceDelta(type(delta.parts)())), "finish_reason": choice.finish_reason}
        if choice.stop_reason is not None:
            end["stop_reason"] = choice.stop_reason
        yield self.chunk(end, lade=choice.figures)

    def last(self) -> Iterator[bytes]:
        """See `Formatter.last`: the usage, if requested, and the end mark."""
        if self.output.body.include_usage:
            end = {"choices": [], "usage": self.output.usage(), **self.output.metrics()}
            yield serialization.event({**self._chunk_head, **end})
        yield serialization.DONE

    @cached_property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head(self.chunk_kind)

    def _head(self, kind: str) -> dict[str, Any]:
        output = self.output
        return {
            "id": f"{self.id_prefix}{output.key}",
            "object": kind,
            "created": output.created,
            "model": output.service.settings.name,
            "system_fingerprint": output.service.fingerprint,
        }


class Answer:
    """Submits the choices of one request and sends them.

    `sent` is the body as the client sent it, if to another API than the preprocessor's.
    """

    def __init__(
        self,
        request: Request,
        preprocessor: Preprocessor,
        make_formatter: Callable[[RequestOutput], Formatter],
        sent: BaseRequest | None = None,
    ) -> None:
        self._request, self._preprocessor, self._body = request, preprocessor, preprocessor.body
        self._service: Service = request.app.state.service
        self._context = RequestContext.of(request.scope)
        self._output = RequestOutput(self._service, self._body, self._context.id)
        self._formatter, self._sent = make_formatter(self._output), sent or self._body
        self._service.track(self._context, self._formatter.endpoint)
        self._headers: dict[str, str] = {}

    async def response(self) -> Response:
        """Return the response: whole, a stream, or an error."""
        try:
            async with asyncio.timeout(self._time_left()):
                await self._submit()
                if self._body.stream:
                    headers = {**STREAM_HEADERS, **self._headers}
                    return StreamingResponse(self._events(), media_type="text/event-stream", headers=headers)
                return await self._whole()
        except Exception as problem:  # noqa: BLE001 - every problem is reported to the client
            return self._failed(problem).response(self._request.scope)

    def _time_left(self) -> float | None:
        """Return the seconds until the deadline, at which the request is aborted; None without one."""
        seconds = timeout_of(self._request.headers, self._body.timeout, self._service.settings.request_timeout)
        if seconds is None:
            return None
        left = max(0.0, seconds - self._context.seconds)
        why = f"the answer was not complete within {seconds:g} s: ask for fewer tokens, or give it a longer timeout"
        again = {"x-should-retry": "false"}  # clients would begin it again by themselves
        error = ApiError(504, TIMEOUT, why, code="deadline_exceeded", headers=again)
        self._context.call_later(left, self._context.abort, error)
        return left

    def _failed(self, problem: Exception) -> ApiError:
        problem = self._context.aborted or problem
        self._context.problem = f"{type(problem).__name__}: {problem}"
        error = error_for(problem, self._context.id)
        if error.status == 500 and any(handle.failed_alone for handle in self._context.handles):
            self._service.failed.add(self._context.owner, self._body)
        self._context.outcome = "error" if error.status == 500 else "rejected"
        field = (error.param or "").partition("[")[0].partition(".")[0]
        error.param = self._formatter.field_names.get(field, error.param)
        return error

    async def _submit(self) -> None:
        """Reserve queue slots before any costly work, so that an overloaded server refuses at once."""
        self._serving = self._output.serving = self._service.serving
        count = self._body.n * self._preprocessor.prompt_count
        self._check(count)
        owner, limits = self._context.owner, self._context.limits
        if self._service.failed.known:
            self._service.failed.check(owner, self._body)
        if limits != NO_LIMITS:
            running = sum(len(each.slots) for each in self._service.in_flight if each.owner == owner)
            self._service.quotas.take(owner, limits, count, running)
        for _ in range(count):
            self._context.slots.append(self._serving.engine.reserve())
        try:
            choices = await self._service.in_worker(self._context.size, self._prepare)
        except UntriedGrammarError:  # raised before the first choice is submitted, as all share the grammar
            trying = partial(self._prepare, tries=True)
            choices = await self._service.trials.run(self._context.owner, trying)
        self._output.choices = choices

    def _check(self, count: int) -> None:
        body, settings = self._body, self._service.settings
        schemas.check_model(body.model, settings)
        most = settings.max_rows + settings.max_waiting
        if count > most:
            limit = f"at most {most} can be decoded or queued: request fewer at a time"
            raise invalid(None, f"{count} choices were requested, and {limit}", "too_large_for_server")
        ignored = schemas.check(body, settings) + schemas.without_effect(self._sent)
        if isinstance(body, ChatRequest):
            ignored += schemas.unused_by_template(body, self._serving.model.chat_template)
        if ignored:
            names = self._formatter.field_names
            self._headers["x-lade-ignored"] = schemas.header(names.get(name, name) for name in ignored)

    def _prepare(self, *, tries: bool = False) -> list[Choice]:
        """Render, tokenize and submit all choices. Called in a worker thread."""
        client = "" if self._service.settings.share == "all" else self._context.owner
        with serving_client(client, tries=tries):
            return self._choices()

    @cached_property
    def _budget(self) -> Any:
        """The time for following grammars, which all choices share."""
        return GrammarCompiler.budget(MASK_SECONDS, MASK_TOKEN_SECONDS)

    def _choices(self) -> list[Choice]:
        body, serving, context = self._body, self._serving, self._serving.context or sys.maxsize
        if body.prediction is not None:
            predicted = serving.model.ids(body.prediction.text, add_special_tokens=False)
            self._output.predicted = predicted[: serving.context]
        choices, slots = list[Choice](), iter(list(self._context.slots))
        for prompt in self._prompts():
            if not prompt.ids:
                raise invalid(None, "the prompt has no tokens: send a longer one")
            if not prompt.media:  # placeholders of images may exceed the vocabulary
                serving.model.check_ids("prompt", prompt.ids)
            if len(prompt.ids) + (body.most_tokens != 0) > context:
                raise self._formatter.too_long(len(prompt.ids), context)
            for _ in range(body.n):
                index = len(choices)
                seed = (self._output.seed + index % body.n) % SEEDS
                arguments = {**self._arguments(prompt), **prompt.media}
                handle = serving.engine.add(prompt.ids, place=next(slots), seed=seed, **arguments)
                ends, silent = frozenset(body.stop_token_ids or ()), body.most_tokens == 0
                parser = self._preprocessor.parser(prompt, serving)
                choices.append(Choice(index, prompt, handle, parser, ends, silent))
        return choices

    def _prompts(self) -> list[EncodedPrompt]:
        prompts = list[EncodedPrompt]()
        for prompt in self._preprocessor.prompts(self._serving):
            if self._context.outcome is not None:
                raise ClientDisconnectedError
            prompts.append(prompt)
        return prompts

    def _arguments(self, prompt: EncodedPrompt) -> dict[str, Any]:
        """Return the arguments of `Engine.add` for a prompt."""
        body, service, serving = self._body, self._service, self._serving
        scope = serving.memories.scope(self._context.owner, body.cache_salt)
        wanted = service.settings.answer_tokens if body.most_tokens is None else body.most_tokens
        context = serving.context
        room = max(1, wanted if context is None else min(wanted, context - len(prompt.ids)))
        least = min(body.min_tokens, room)
        keeps_tags = self._preprocessor.parses_markup and serving.markup.has_special_tokens
        arguments = generate_arguments(body, serving.model, len(prompt.ids))
        if (constraint := self._preprocessor.grammar(prompt, serving)) is not None:
            check_ends(body, constraint[1])
            with service.metrics.compiled.time():
                processor = serving.grammars.processor(*constraint, self._budget)
            arguments.setdefault("logits_processor", []).append(processor)
        return {
            **arguments,
            "stop_texts": body.stop,
            "tokenizer": serving.model.tokenizer,
            "skip_special_tokens": body.skip_special_tokens and not keeps_tags,
            "logprobs": self._preprocessor.top_logprobs,
            "prompt_logprobs": self._preprocessor.prompt_logprobs,
            "scope": scope,
            "client": self._context.owner,
            **({"min_new_tokens": least} if least else {}),
            "max_new_tokens": room,
            "prediction": self._output.predicted,
            "lookahead": serving.memories.lookahead(lookahead_of(body.lookahead), scope),
        }

    async def _deltas(self, silence_s: float | None) -> AsyncGenerator[tuple[Choice, ChoiceDelta] | None]:
        """Yield choices with their new parts as they arrive; None after `silence_s` seconds of silence."""
        choices = self._output.choices
        async with aclosing(serialization.interleaved([aiter(each.handle) for each in choices], silence_s)) as steps:
            async for found in steps:
                if found is None:
                    yield None
                    continue
                number, step = found
                if self._context.first_s is None and step is not None:
                    self._context.first_s = self._context.seconds
                yield choices[number], choices[number].finish() if step is None else choices[number].take(step)
        self._context.outcome = choices[0].finish_reason
        self._context.predictions = self._output.predictions()

    async def _whole(self) -> Response:
        async for _ in self._deltas(None):
            pass
        if self._preprocessor.top_logprobs is None:
            return self._formatted()
        return await self._service.in_worker(self._context.size, self._formatted)  # logprobs take long to format

    def _formatted(self) -> Response:
        return Json(self._formatter.whole(), headers=self._headers)

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield the encoded events of a stream."""
        formatter, begun = self._formatter, False
        try:
            async with aclosing(self._deltas(self._service.settings.ping_s)) as deltas:
                async for found in deltas:
                    if found is None:
                        if self._context.aborted is not None:  # and the engine does not end its row
                            raise self._context.aborted
                        yield formatter.ping()
                        continue
                    for event in () if begun else formatter.first():
                        yield event
                    begun = True
                    for event in await self._step_events(*found):
                        yield event
            for event in formatter.last():
                yield event
        except Exception as problem:  # noqa: BLE001 - the status is sent already, so an event reports the problem
            for event in formatter.failed(self._failed(problem)):
                yield event

    async def _step_events(self, choice: Choice, delta: ChoiceDelta) -> list[bytes]:
        def formatted() -> list[bytes]:
            return list(self._formatter.step(choice, delta))

        if delta is choice.deltas[0] and choice.handle.prompt_logprobs:  # as many as the prompt has tokens
            return await self._service.in_worker(self._context.size, formatted)
        return formatted()
