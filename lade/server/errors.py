"""Errors in the forms of OpenAI's and Anthropic's APIs: a status, and an object with message and remedy."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from lade.errors import ClusterError, ConfigError, EngineClosedError, EngineFullError, InputError, UnsupportedError
from lade.grammar import GrammarError
from lade.server.serialization import Json

logger = logging.getLogger(__name__)

INVALID, AUTHENTICATION, PERMISSION = "invalid_request_error", "authentication_error", "permission_error"
NOT_FOUND, OVERLOADED, SERVER = "not_found_error", "overloaded_error", "server_error"
TIMEOUT, RATE_LIMIT = "timeout_error", "rate_limit_error"
INVALID_SCHEMA = "invalid_schema"
_MAX_SHOWN = 60


@dataclass(eq=False)
class ApiError(Exception):
    """An error response."""

    status: int
    kind: str  # one of the error types above
    message: str  # the problem and its remedy
    _: KW_ONLY
    param: str | None = None  # path of the field in question, such as `messages[2].content`
    code: str | None = None  # machine-readable name of the case
    headers: Mapping[str, str] | None = None  # to add to the response

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """Response body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self, scope: Scope) -> Response:
        """Return the HTTP response to a request, in the format of its API."""
        context = scope["state"]["context"]
        if not context.is_anthropic:
            return Json(self.body, self.status, headers=self.headers)
        body = anthropic_error(self.status, self.message, context.id)
        return Json(body, 529 if self.status == 503 else self.status, headers=self.headers)


def invalid(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """Return the error for a field with an invalid value, which its message names first."""
    return ApiError(400, INVALID, message if param is None else f"{param}: {message}", param=param, code=code)


def too_long(param: str, message: str) -> ApiError:
    """Return the error for a prompt that does not fit, in the wording that clients parse."""
    return ApiError(400, INVALID, message, param=param, code="context_length_exceeded")


def unsupported(param: str, message: str) -> ApiError:
    """Return the error for a feature that this server does not support."""
    return invalid(param, message, "unsupported_parameter")


def overloaded(message: str, code: str, retry_after: int = 1, *, close: bool = False) -> ApiError:
    """Return the error for a request to be retried later or elsewhere."""
    headers = {"Retry-After": str(retry_after), **({"Connection": "close"} if close else {})}
    return ApiError(503, OVERLOADED, message, code=code, headers=headers)


def internal(request_id: str) -> ApiError:
    """Return the error for a fault of the server."""
    return ApiError(500, SERVER, f"internal error: see {request_id} in the server's log", code="internal_error")


def error_for(problem: BaseException, request_id: str) -> ApiError:
    """Return the response for an exception; faults of the server are logged."""
    match problem:
        case ApiError():
            return problem
        case EngineFullError():
            return overloaded("the queue is full: retry later", "engine_overloaded")
        case EngineClosedError():
            return overloaded("the engine is closed", "engine_closed", close=True)
        case ConfigError():
            return ApiError(400, INVALID, str(problem), param=problem.field, code="invalid_value")
        case UnsupportedError():
            return invalid(None, problem.reason, "unsupported_parameter")
        case GrammarError():
            return invalid(None, str(problem), INVALID_SCHEMA)
        case InputError():
            return invalid(None, str(problem), "too_large_for_server")
        case ClusterError():
            logger.error("%s failed: %s", request_id, problem)  # the library's message holds no request data
            return internal(request_id)
    logger.error("%s failed", request_id, exc_info=problem)
    return internal(request_id)


NOT_JSON = ApiError(400, INVALID, "the body is not valid JSON: send an object", code="invalid_json")


async def error_response(request: Request, problem: Any) -> Response:
    """Report an `ApiError`, or an `HTTPException` raised before a route is reached, in this form."""
    path = request.url.path
    match problem:
        case ApiError():
            error = problem
        case HTTPException(status_code=404):
            error = ApiError(404, NOT_FOUND, f"no endpoint at {path}: /openapi.json lists them", code="unknown_url")
        case HTTPException(status_code=405):
            why = f"{path} does not accept {request.method}: see /openapi.json"
            error = ApiError(405, INVALID, why, code="unknown_url", headers=problem.headers)
        case _:
            error = NOT_JSON
    return error.response(request.scope)


def validation_error(found: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Convert pydantic's errors to one, of the union branch that fits best."""
    places = [_place(each, body) for each in found]
    deepest = max(range(len(found)), key=lambda at: (len(places[at][0]), _fit(str(found[at]["type"]))))
    (names, value), what = places[deepest], str(found[deepest]["msg"]).removeprefix("Value error, ")
    param = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).removeprefix(".")
    number = isinstance(value, bool | int | float) and len(str(value)) < _MAX_SHOWN
    what = f"{what}{f' (got {value!r})' if number else ''}"
    return invalid(param, what) if param else invalid(None, f"the body: {what}")


def _fit(kind: str) -> int:
    """Return how well a value fits a branch of a union: `[]`, for a text or a list, is a list that lacks items."""
    return 0 if kind == "missing" else 1 if kind.endswith("_type") else 2


def _place(found: Mapping[str, Any], body: Any) -> tuple[list[str | int], Any]:
    """Return path and value of an error, without the names of union branches in its location."""
    value, names = body, list[str | int]()
    for number, part in enumerate(found["loc"], start=1):
        if _has(value, part):
            value = value[part]
        elif found["type"] != "missing" or number < len(found["loc"]):
            continue
        names.append(part if isinstance(part, int) else part[:_MAX_SHOWN])
    return names, value


def _has(place: Any, part: str | int) -> bool:
    if isinstance(place, list):
        return isinstance(part, int) and 0 <= part < len(place)
    return isinstance(place, dict) and part in place


_ANTHROPIC_TYPES = {
    401: AUTHENTICATION,
    403: PERMISSION,
    404: NOT_FOUND,
    413: "request_too_large",
    429: RATE_LIMIT,
    503: OVERLOADED,
    504: TIMEOUT,
}


def anthropic_error(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's format."""
    kind = _ANTHROPIC_TYPES.get(status, INVALID if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
