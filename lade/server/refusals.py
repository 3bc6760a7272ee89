"""Fields that ask for something else than what is served, and fields that nobody knows."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

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
    "prompt_logprobs": "ask /v1/completions for echo and logprobs",
    "suffix": "text is only continued",
    "use_beam_search": "beams are not served",
    "web_search_options": "this server has no web",
}
"""Answers that took no notice of them would be wrong ones."""
_WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "client_metadata": (),
    "include": (),
    "metadata": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning.summary": (),
    "safety_identifier": (),
    "service_tier": ("auto", "default", "standard_only"),
    "store": (),
    "text.verbosity": ("medium",),
    "thinking.budget_tokens": (),
    "truncation": ("disabled",),
    "user": (),
    "verbosity": ("medium",),
}
"""Fields that are taken because clients send them, and the values that ask for no more than is done anyway."""
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
    """The names of the fields that nobody knows, which are ignored.

    Raises:
        ApiError: one must not be.
    """
    extra = body.model_extra or {}
    for name, why in REFUSED.items():
        value = extra.get(name)
        if value or type(value) is int:  # prompt_logprobs of 0 are some
            raise unsupported(name, f"{name}: {why}")
    modalities = extra.get("modalities")
    if modalities and modalities != ["text"]:
        raise unsupported("modalities", "modalities: only text is written")
    if body.best_of is not None and body.best_of > body.n:
        why = f"best_of: {body.best_of} are more than n={body.n}, and answers are not ranked: ask for n={body.best_of}"
        raise unsupported("best_of", f"{why}, and choose among them")
    if isinstance(body, ChatRequest):
        _check_chat(body)
    unknown = [name if _NAME.fullmatch(name) else "?" for name in extra if name not in (*REFUSED, "modalities")]
    if unknown and settings.strict:
        raise invalid(unknown[0], f"{unknown[0]}: there is no such field: leave it out")
    return unknown + [name for name in REFUSED if extra.get(name) == {}]


def without_effect(asked: Decoding) -> list[str]:
    """The names of the fields that are known, ask for something, and change nothing here.

    Args:
        asked: the request as its client has sent it.
    """
    return [name for name, anyway in _WITHOUT_EFFECT.items() if (_value(asked, name) or None) not in (None, *anyway)]


def unused_by_template(body: ChatRequest, template: str) -> list[str]:
    """The names of what is for the chat template, which takes no notice of it."""
    unused = [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or {} if name not in template]
    return unused + ["reasoning_effort"] * (body.reasoning_effort is not None and "reasoning_effort" not in template)


def header(names: Iterable[str]) -> str:
    """The names of ignored fields as they are told to the client."""
    return ", ".join(sorted(set(names))[:_MOST_NAMED])


def _value(asked: Any, name: str) -> Any:
    """That of a field, or of a field of a field; None where there is none."""
    return functools.reduce(lambda inner, each: getattr(inner, each, None), name.split("."), asked)


def _check_chat(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs: it needs logprobs: true")
