"""`/tokenize`, `/detokenize`, and what counts tokens: the ids that a model would see, without decoding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import Field

from lade.server import refusals
from lade.server.errors import invalid
from lade.server.messages.conversation import as_chat
from lade.server.messages.schemas import CountRequest
from lade.server.responses.conversation import as_chat as input_as_chat
from lade.server.responses.schemas import ResponsesRequest
from lade.server.schemas import ChatRequest, Flag, Model, Text, TokenId
from lade.server.service import Service
from lade.server.settings import MOST_IDS

T = TypeVar("T")


class TokenizeText(Model):
    """Of `/tokenize`: a text as it is."""

    model: str | None = None
    prompt: Text
    add_special_tokens: Flag = True
    return_token_strs: Flag = False


class TokenizeChat(ChatRequest):
    """Of `/tokenize`: a conversation, through the chat template."""

    return_token_strs: Flag = False


class DetokenizeRequest(Model):
    """Of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_IDS)]


async def tokenize(service: Service, asked: TokenizeText | TokenizeChat) -> dict[str, Any]:
    """The ids of a text or a conversation, in vLLM's form.

    Raises:
        ApiError: the model is not served, or its template refuses the conversation; or there is a text beside it.
    """
    refusals.check_model(asked.model, service.settings)
    if (asked.model_extra or {}).keys() & {"prompt", "messages"}:
        raise invalid("prompt", "prompt: there are messages, too: leave out one of them")
    tokenizer = service.model.tokenizer

    def encode() -> list[int]:
        if isinstance(asked, ChatRequest):
            return _templated(service, asked)
        with service.encoding:
            ids: list[int] = tokenizer(asked.prompt, add_special_tokens=asked.add_special_tokens)["input_ids"]
        return ids

    ids = await _prepared(service, encode)
    strings = tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
    return {"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": strings}


async def detokenize(service: Service, asked: DetokenizeRequest) -> dict[str, Any]:
    """The text of some ids.

    Raises:
        ApiError: the model is not served, or has no such id.
    """
    refusals.check_model(asked.model, service.settings)
    model = service.model
    if max(asked.tokens, default=0) >= model.vocabulary:
        why = f"tokens: the id {max(asked.tokens)} is out of the vocabulary: give ids below {model.vocabulary}"
        raise invalid("tokens", why)
    return {"prompt": await _prepared(service, lambda: str(model.tokenizer.decode(asked.tokens)))}


async def count_tokens(service: Service, asked: CountRequest) -> dict[str, Any]:
    """How many tokens a request to `/v1/messages` would have the model read; raises like `tokenize`."""
    refusals.check_model(asked.model, service.settings)
    ids = await _prepared(service, lambda: _templated(service, as_chat(asked)))
    return {"input_tokens": len(ids)}


async def input_tokens(service: Service, asked: ResponsesRequest) -> dict[str, Any]:
    """How many tokens a request to `/v1/responses` would have the model read; raises like `tokenize`."""
    refusals.check_model(asked.model, service.settings)
    ids = await _prepared(service, lambda: _templated(service, input_as_chat(asked)))
    return {"object": "response.input_tokens", "input_tokens": len(ids)}


def _templated(service: Service, asked: ChatRequest) -> list[int]:
    with service.encoding:
        return service.template.encode(asked)[0]


async def _prepared(service: Service, work: Callable[[], T]) -> T:
    """What comes of some work, done where requests are prepared."""
    assert service.model is not None  # raises while requests are refused
    return await service.prepared(0, work)
