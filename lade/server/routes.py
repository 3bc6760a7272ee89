"""HTTP routes and their OpenAPI description."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from lade.errors import EngineClosedError, EngineFullError
from lade.server.answer import Answer
from lade.server.completions import ChatFormatter, ChatPreprocessor, CompletionFormatter, CompletionPreprocessor
from lade.server.errors import NOT_FOUND, ApiError, error_for, invalid
from lade.server.messages import CountRequest, MessagesFormatter, MessagesRequest
from lade.server.messages import as_chat as turns_as_chat
from lade.server.metrics import CONTENT_TYPE
from lade.server.middleware import BodyRoute, in_worker_if_large
from lade.server.request_context import RequestContext
from lade.server.responses import ResponsesFormatter, ResponsesRequest
from lade.server.responses import as_chat as items_as_chat
from lade.server.sampling_parameters import sampling_defaults
from lade.server.schemas import (
    BaseRequest,
    ChatRequest,
    CompletionRequest,
    Flag,
    Model,
    Text,
    TokenId,
    check_model,
    not_served,
)
from lade.server.serialization import Json, event
from lade.server.service import Service, Serving
from lade.server.settings import MAX_DETOKENIZED
from lade.serving.handle import Handle
from lade.version import __version__, versions

B = TypeVar("B", bound=BaseRequest)
Described = dict[int | str, dict[str, Any]]  # responses by status, as FastAPI takes them
_NULLABLE = {"type": ["string", "null"]}


def _object(**members: Any) -> dict[str, Any]:
    """Return the schema of an object with these members."""
    return {"type": "object", "required": list(members), "properties": members}


def _list_of(what: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": what}


def _as_json(schema: dict[str, Any], what: str) -> dict[str, Any]:
    return {"description": what, "content": {"application/json": {"schema": schema}}}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_ERROR = _object(error=_object(message=TEXT, type=TEXT, param=_NULLABLE, code=_NULLABLE))
_ANTHROPICS = _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT), request_id=TEXT)
_STATUS = _object(status={"enum": ["ok", "loading", "draining", "dead", "stuck"]})
_STREAM = {"schema": {"description": "Server-sent events, with JSON in their data"}}


def errors(schema: dict[str, Any] = _ERROR) -> Described:
    """Return the error responses of every path."""
    return {"4XX": _as_json(schema, "What is wrong, and the remedy"), "5XX": _as_json(schema, "Not now, or not at all")}


def whole(*, streams: bool = False, **members: Any) -> Described:
    """Return the description of a response object, or of events if the request has `stream`."""
    answer = _as_json(_object(**members), "The answer")
    if streams:
        answer["content"]["text/event-stream"] = _STREAM
    return {200: answer}


ERRORS, ANTHROPICS_ERRORS = errors(), errors(_ANTHROPICS)
HEALTH: Described = {200: _as_json(_STATUS, "Yes"), 503: _as_json(_STATUS, "No")}
EVENTS: Described = {200: {"description": "Server-sent events", "content": {"text/event-stream": _STREAM}}}
OBJECT = {"type": "object"}
CHAT = whole(streams=True, id=TEXT, object=TEXT, created=COUNT, model=TEXT, choices=_list_of(OBJECT), usage=OBJECT)
RESPONSE = whole(streams=True, id=TEXT, object=TEXT, status=TEXT, output=_list_of(OBJECT), usage=OBJECT)
MESSAGE = whole(streams=True, id=TEXT, type=TEXT, role=TEXT, content=_list_of(OBJECT), stop_reason=TEXT, usage=OBJECT)
LIST = _list_of(TEXT)
TOKENS = whole(count=COUNT, tokens=_list_of(COUNT))
ROWS = _list_of(_object(id=TEXT, state=TEXT, prompt_tokens=COUNT, answer_tokens=COUNT))
MODEL: dict[str, Any] = {"id": TEXT, "object": TEXT, "created": COUNT, "owned_by": TEXT}
MODELS = whole(object={"const": "list"}, data=_list_of(_object(**MODEL)), has_more={"type": "boolean"})


router = APIRouter(responses=ERRORS, route_class=BodyRoute)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


@router.post("/v1/chat/completions", responses=CHAT)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    return await Answer(request, ChatPreprocessor(body), ChatFormatter).response()


@router.post("/v1/completions", responses=CHAT)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Continue texts."""
    return await Answer(request, CompletionPreprocessor(body), CompletionFormatter).response()


@router.post("/v1/responses", responses=RESPONSE)
async def responses(request: Request, body: ResponsesRequest) -> Response:
    """Answer a conversation that is a list of items."""
    chat = await in_worker_if_large(request, partial(items_as_chat, body))
    preprocessor = ChatPreprocessor(chat, "text.format")
    return await Answer(request, preprocessor, partial(ResponsesFormatter, body), sent=body).response()


@router.post("/v1/responses/input_tokens", responses=whole(object=TEXT, input_tokens=COUNT))
async def tokens_of_input(request: Request, body: ResponsesRequest) -> Response:
    """Count the prompt tokens of a response."""
    return await _counted(request, body, items_as_chat, object="response.input_tokens")


@router.post("/v1/messages", responses={**ANTHROPICS_ERRORS, **MESSAGE})
async def messages(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation as Anthropic's API does."""
    chat = await in_worker_if_large(request, partial(turns_as_chat, body))
    preprocessor = ChatPreprocessor(chat, "output_config.format")
    return await Answer(request, preprocessor, MessagesFormatter, sent=body).response()


@router.post("/v1/messages/count_tokens", responses={**ANTHROPICS_ERRORS, **whole(input_tokens=COUNT)})
async def tokens_of_messages(request: Request, body: CountRequest) -> Response:
    """Count the prompt tokens of a message."""
    return await _counted(request, body, turns_as_chat)


class TokenizeText(Model):
    """Request body of `/tokenize` for a text."""

    model: str | None = None
    prompt: Text
    add_special_tokens: Flag = True


@router.post("/tokenize", responses=TOKENS)
async def tokenize(request: Request, body: TokenizeText | ChatRequest) -> Response:
    """Tokenize a text or a conversation, in vLLM's format."""
    if (body.model_extra or {}).keys() & {"prompt", "messages"}:
        raise invalid("prompt", "contradicts messages: leave out one of them")

    def encode(serving: Serving) -> dict[str, Any]:
        if isinstance(body, ChatRequest):
            ids = serving.template.encode(body)[0]
        else:
            ids = serving.model.ids(body.prompt, add_special_tokens=body.add_special_tokens)
        return {"count": len(ids), "max_model_len": serving.context, "tokens": ids}

    return await _tokenized(request, body.model, encode)


class DetokenizeRequest(Model):
    """Request body of `/detokenize`."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_DETOKENIZED)]


@router.post("/detokenize", responses=whole(prompt=TEXT))
async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    """Detokenize ids."""

    def decode(serving: Serving) -> dict[str, Any]:
        serving.model.check_ids("tokens", body.tokens)
        return {"prompt": str(serving.model.tokenizer.decode(body.tokens))}

    return await _tokenized(request, body.model, decode)


async def _counted(request: Request, body: B, as_chat: Callable[[B], ChatRequest], **members: str) -> Response:
    """Count the prompt tokens of a request of another API, once it is a chat request."""

    def count(serving: Serving) -> dict[str, Any]:
        return {**members, "input_tokens": len(serving.template.encode(as_chat(body))[0])}

    return await _tokenized(request, body.model, count)


async def _tokenized(request: Request, name: str | None, work: Callable[[Serving], dict[str, Any]]) -> Response:
    """Run work like the preparation of a request: in a queue slot and in a worker thread."""
    service, context = _service(request), RequestContext.of(request.scope)
    check_model(name, service.settings)
    serving = service.serving
    try:
        with serving.engine.reserve():
            return await service.in_worker(context.size, lambda: Json(work(serving)))
    except (EngineFullError, EngineClosedError) as problem:
        raise error_for(problem, context.id) from None


@router.get("/live", responses=HEALTH)
async def live(request: Request) -> Response:
    """Liveness probe: fails if the process should be restarted."""
    health = _service(request).health
    return Json(health, 503) if "reason" in health else Json({"status": "ok"})


@router.get("/ready", responses=HEALTH)
@router.get("/health", responses=HEALTH)
@router.get("/v1/health", responses=HEALTH)
async def ready(request: Request) -> Response:
    """Readiness probe: succeeds if requests are accepted."""
    health = _service(request).health
    return Json(health, 200 if health["status"] == "ok" else 503)


@router.get("/v1", responses=whole(message=TEXT, routes=LIST))
@router.get("/v1/", include_in_schema=False)
async def base(request: Request) -> Response:
    """Describe the API at its base URL."""
    routes = [route for route in router.routes if isinstance(route, APIRoute) and route.include_in_schema]
    names = [f"{method} {route.path_format}" for route in routes for method in sorted(route.methods or ())]
    why = "base URL for clients of OpenAI's API; /openapi.json describes the endpoints"
    return Json({"message": why, "routes": names})


@router.get("/v1/models", responses=MODELS)
async def models(request: Request) -> Response:
    """List the served models."""
    service = _service(request)
    names = service.settings.names
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return Json({"object": "list", "data": [_described(service, name) for name in names], **page})


@router.get("/v1/models/{name:path}", responses=whole(**MODEL))
async def model(request: Request, name: str) -> Response:
    """Describe one served model."""
    service = _service(request)
    if name not in service.settings.names:
        raise not_served(name, service.settings)
    return Json(_described(service, name))


def _described(service: Service, name: str) -> dict[str, Any]:
    serving, model = service.serving, service.serving.model
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "lade",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "root": service.settings.name,
        "max_model_len": serving.context,
        "lade": {
            "chat": bool(model.chat_template),
            "context": serving.context,
            "images": model.encode_images is not None,
            "defaults": {**sampling_defaults(model), "max_tokens": service.settings.answer_tokens},
            "page": {} if model.sampling else {"temperature": 0.0},  # sent by the page: as `lade chat`, greedy
        },
    }


@router.get("/version", responses=whole(version=TEXT, torch=TEXT, transformers=TEXT, python=TEXT))
async def version(request: Request) -> Response:
    """Return versions."""
    return Json({"version": __version__, **versions()})


@router.get("/v1/lade/status", responses=whole(state=TEXT, rows=ROWS))
async def status(request: Request) -> Response:
    """List the running requests of this key, without their texts; those of others are told by no number here."""
    service, owner = _service(request), RequestContext.of(request.scope).owner
    now, shared = service.serving.engine.snapshot(), service.settings.share == "all"
    own = [each for each in service.in_flight if shared or each.owner == owner]
    alone = shared or len(service.keys.all) < 2
    used = {"used": now.slots, "reserved": now.room} if alone else {}  # they grow with others' texts
    body = {
        "state": "ok",
        **({"replica": service.settings.replica, "pid": os.getpid()} if service.settings.replica else {}),
        "rows_limit": now.max_rows,
        "waiting_limit": now.max_waiting,
        "kv_slots": {**used, "limit": now.max_slots},
        "rows": [_row(context, handle) for context in own for handle in context.handles],
    }
    return Json(body)


def _row(context: RequestContext, handle: Handle) -> dict[str, Any]:
    state = "queued" if handle.queue_s is None else "prefill" if handle.prefill_s is None else "decoding"
    return {
        "id": context.id,
        "state": state,
        "age_s": round(context.seconds, 3),
        "prompt_tokens": handle.prompt_tokens,
        "answer_tokens": handle.stats.new_tokens,
        "tokens_per_step": round(handle.stats.tokens_per_step, 3),
    }


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics."""
    service = _service(request)
    if not service.settings.metrics:
        why = "metrics are disabled: start the server without --no-metrics"
        raise ApiError(404, NOT_FOUND, why, code="metrics_disabled")
    return Response(service.metrics.text(), media_type=CONTENT_TYPE)


class LoadRequest(Model):
    """Request body of `/load_model`."""

    model: str | None = None


@router.post("/load_model", response_class=StreamingResponse, responses=EVENTS)
async def load_model(request: Request, body: LoadRequest) -> Response:
    """Report the model as loaded, for `transformers chat`."""
    service = _service(request)
    ready_now = {"status": "ready", "cached": service.serving is not None, "model": service.settings.name}
    return Response(event(ready_now), media_type="text/event-stream")
