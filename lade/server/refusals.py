"""Fields that ask for something else than what is served, and fields that nobody knows."""

from __future__ import annotations

import re

from lade.server.errors import NOT_FOUND, ApiError, invalid, unsupported
from lade.server.schemas import ChatRequest, Decoding
from lade.server.settings import Settings

REFUSED = {
    "audio": "this server makes no sound",
    "background": "answers are not kept",
    "chat_template": "templates of requests are not run: start the server with --chat-template",
    "conversation": "conversations are not kept: send all messages",
    "function_call": "it was replaced: use tools",
    "functions": "it was replaced: use tools",
    "grammar": "give structured_outputs with a Lark grammar",
    "previous_response_id": "answers are not kept: send all messages",
    "prompt_logprobs": "only tokens of answers have logprobs",
    "suffix": "text is only continued",
    "use_beam_search": "beams are not served",
    "web_search_options": "this server has no web",
}
"""Answers that took no notice of them would be wrong ones."""
_UNNAMED = "dummy"
"""What huggingface_hub sends where its user names no model."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MOST_NAMED = 20


def check_model(name: str | None, settings: Settings) -> None:
    """Raise `ApiError` for a model that is not served."""
    if name not in (None, _UNNAMED, *settings.names):
        why = f"model {str(name)[:100]!r} is not served: there is {', '.join(settings.names)}"
        raise ApiError(404, NOT_FOUND, why, param="model", code="model_not_found")


def check(body: Decoding, settings: Settings) -> list[str]:
    """The names of the fields that are ignored.

    Raises:
        ApiError: one must not be.
    """
    extra = body.model_extra or {}
    for name, why in REFUSED.items():
        if extra.get(name):
            raise unsupported(name, f"{name}: {why}")
    modalities = extra.get("modalities")
    if modalities and modalities != ["text"]:
        raise unsupported("modalities", "modalities: only text is written")
    if body.best_of is not None and body.best_of > body.n:
        why = f"best_of: {body.best_of} are more than n={body.n}, and answers are not ranked: ask for n={body.best_of}"
        raise unsupported("best_of", f"{why}, and choose among them")
    if isinstance(body, ChatRequest):
        _check_chat(body)
    unknown = [name if _NAME.fullmatch(name) else "?" for name in extra if name not in REFUSED]
    if unknown and settings.strict:
        raise invalid(unknown[0], f"{unknown[0]}: there is no such field: leave it out")
    return sorted(set(unknown))[:_MOST_NAMED]


def _check_chat(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs: it needs logprobs: true")
