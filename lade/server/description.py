"""What `/openapi.json` says of answers. Bodies of requests are described by their own classes."""

from __future__ import annotations

from typing import Any

Described = dict[int | str, dict[str, Any]]
"""By status, as FastAPI takes them."""
_NULLABLE = {"type": ["string", "null"]}


def _object(**members: Any) -> dict[str, Any]:
    """One that has these members, and perhaps others."""
    return {"type": "object", "required": list(members), "properties": members}


def _list_of(what: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": what}


def _as_json(schema: dict[str, Any], what: str) -> dict[str, Any]:
    return {"description": what, "content": {"application/json": {"schema": schema}}}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_ERROR = _object(error=_object(message=TEXT, type=TEXT, param=_NULLABLE, code=_NULLABLE))
_ANTHROPICS = _object(type={"const": "error"}, error=_object(type=TEXT, message=TEXT), request_id=TEXT)
_STATUS = _object(status={"enum": ["ok", "loading", "draining", "dead"]})
_STREAM = {"schema": {"description": "Server-sent events, with JSON in their data"}}


def errors(schema: dict[str, Any] = _ERROR) -> Described:
    """Of every path."""
    return {"4XX": _as_json(schema, "What is wrong, and the remedy"), "5XX": _as_json(schema, "Not now, or not at all")}


def whole(**members: Any) -> Described:
    """An answer that is an object with these members."""
    return {200: _as_json(_object(**members), "The answer")}


def whole_or_stream(**members: Any) -> Described:
    """The same, or events where the request has `stream`."""
    described = whole(**members)
    described[200]["content"]["text/event-stream"] = _STREAM
    return described


ERRORS, ANTHROPICS_ERRORS = errors(), errors(_ANTHROPICS)
HEALTH: Described = {200: _as_json(_STATUS, "Yes"), 503: _as_json(_STATUS, "No")}
EVENTS: Described = {200: {"description": "Server-sent events", "content": {"text/event-stream": _STREAM}}}
OBJECT = {"type": "object"}
CHAT = whole_or_stream(id=TEXT, object=TEXT, created=COUNT, model=TEXT, choices=_list_of(OBJECT), usage=OBJECT)
RESPONSE = whole_or_stream(id=TEXT, object=TEXT, status=TEXT, output=_list_of(OBJECT), usage=OBJECT)
MESSAGE = whole_or_stream(id=TEXT, type=TEXT, role=TEXT, content=_list_of(OBJECT), stop_reason=TEXT, usage=OBJECT)
LIST = _list_of(TEXT)
TOKENS = whole(count=COUNT, tokens=_list_of(COUNT))
ROWS = _list_of(_object(id=TEXT, state=TEXT, prompt_tokens=COUNT, answer_tokens=COUNT))
MODEL = {"id": TEXT, "object": TEXT, "created": COUNT, "owned_by": TEXT}
MODELS = whole(object={"const": "list"}, data=_list_of(_object(**MODEL)), has_more={"type": "boolean"})
