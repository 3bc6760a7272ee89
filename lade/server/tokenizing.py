"""`/tokenize`, `/detokenize` and token counts: a request's ids without decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from lade.errors import EngineClosedError, EngineFullError
from lade.server import schemas
from lade.server.errors import TOO_LONG, error_for, invalid
from lade.server.messages import CountRequest, as_chat
from lade.server.request_context import RequestContext, until_disconnect
from lade.server.responses import ResponsesRequest
from lade.server.responses import as_chat as input_as_chat
from lade.server.schemas import ChatRequest, Flag, Model, Text, TokenId
from lade.server.serialization import Json
from lade.server.served_model import TextTooLongError
from lade.server.service import Service
from lade.server.settings import MAX_DETOKENIZED


class TokenizeText(Model):
    """Request body of `/tokenize` for a text."""

    model: str | None = None
    prompt: Text
    add_special_tokens: Flag = True
    return_token_strs: Flag = False


class TokenizeChat(ChatRequest):
    """Request body of `/tokenize` for a conversation."""

    return_token_strs: Flag = False


class DetokenizeRequest(Model):
    """Request body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_DETOKENIZED)]


async def tokenize(service: Service, request: Request, body: TokenizeText | TokenizeChat) -> Response:
    """Return the ids of a text or a conversation, in vLLM's format.

    Raises:
        ApiError: unknown model, both text and messages, refused by the template, too long, or the queue is full.
    """
    schemas.check_model(body.model, service.settings)
    if (body.model_extra or {}).keys() & {"prompt", "messages"}:
        raise invalid("prompt", "prompt: contradicts messages: leave out one of them")
    tokenizer = service.model.tokenizer

    def encode() -> dict[str, Any]:
        if isinstance(body, ChatRequest):
            ids = service.template.encode(body)[0]
        else:
            ids = service.encoder.ids(body.prompt, add_special_tokens=body.add_special_tokens)
        strings = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": strings}

    return await _answered(service, request, encode, "messages" if isinstance(body, ChatRequest) else "prompt")


async def detokenize(service: Service, request: Request, body: DetokenizeRequest) -> Response:
    """Return the text of ids.

    Raises:
        ApiError: unknown model, an id outside the vocabulary, or the queue is full.
    """
    schemas.check_model(body.model, service.settings)
    model = service.model

    def decode() -> dict[str, Any]:
        greatest = max(body.tokens, default=0)
        if greatest >= model.vocabulary:
            why = f"tokens: token id {greatest} is outside the vocabulary: give ids below {model.vocabulary}"
            raise invalid("tokens", why)
        return {"prompt": str(model.tokenizer.decode(body.tokens))}

    return await _answered(service, request, decode, "tokens")


async def count_tokens(service: Service, request: Request, body: CountRequest) -> Response:
    """Count the prompt tokens of a `/v1/messages` request; raises like `tokenize`."""
    schemas.check_model(body.model, service.settings)

    def count() -> dict[str, Any]:
        return {"input_tokens": len(service.template.encode(as_chat(body))[0])}

    return await _answered(service, request, count, "messages")


async def input_tokens(service: Service, request: Request, body: ResponsesRequest) -> Response:
    """Count the prompt tokens of a `/v1/responses` request; raises like `tokenize`."""
    schemas.check_model(body.model, service.settings)

    def count() -> dict[str, Any]:
        ids = service.template.encode(input_as_chat(body))[0]
        return {"object": "response.input_tokens", "input_tokens": len(ids)}

    return await _answered(service, request, count, "input")


async def _answered(service: Service, request: Request, work: Callable[[], dict[str, Any]], field: str) -> Response:
    """Run work like the preparation of a request: in a queue slot and in a worker thread."""
    context = RequestContext.of(request.scope)
    try:
        with service.engine.reserve():
            return await until_disconnect(request, service.in_worker(context.size, lambda: Json(work())))
    except (EngineFullError, EngineClosedError) as problem:
        raise error_for(problem, context.id) from None
    except TextTooLongError as problem:
        why = f"{field}: at least {problem.tokens} tokens exceed the context of {service.context}: shorten it"
        raise invalid(field, why, TOO_LONG) from None
