"""Requests of other APIs as requests of the chat API, which answers them."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from lade.server.errors import validation_error
from lade.server.schemas import ChatRequest, Decoding


def chat_request(asked: Decoding, **fields: Any) -> ChatRequest:
    """The chat request that means the same.

    Args:
        asked: the request. What all APIs here have in common is taken over, and so is what nobody knows, to be refused
            or named by the same rules.
        fields: of the chat request; None for those that nothing was said about.

    Raises:
        ApiError: a value that the chat API does not take.
    """
    shared = {name: getattr(asked, name) for name in Decoding.model_fields if name in asked.model_fields_set}
    given = {name: value for name, value in fields.items() if value is not None}
    whole = {**(asked.model_extra or {}), **shared, **given}
    try:
        return ChatRequest.model_validate(whole)
    except ValidationError as problem:
        raise validation_error(problem.errors(), whole) from None
