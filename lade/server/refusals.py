"""Fields that ask for something else than what is served, and fields that nobody knows."""

from __future__ import annotations

import re

from lade.server.errors import invalid, unsupported
from lade.server.schemas import ChatRequest, Decoding
from lade.server.settings import Settings

REFUSED = {
    "audio": "this server makes no sound",
    "background": "answers are not kept",
    "best_of": "ask for n answers, and choose among them",
    "chat_template": "templates of requests are not run: start the server with --chat-template",
    "conversation": "conversations are not kept: send all messages",
    "function_call": "it was replaced: use tools",
    "functions": "it was replaced: use tools",
    "grammar": "grammars are not served",
    "guided_choice": "grammars are not served",
    "guided_grammar": "grammars are not served",
    "guided_json": "schemas are not served",
    "guided_regex": "grammars are not served",
    "previous_response_id": "answers are not kept: send all messages",
    "prompt_logprobs": "only tokens of answers have logprobs",
    "structured_outputs": "schemas and grammars are not served",
    "suffix": "text is only continued",
    "use_beam_search": "beams are not served",
    "web_search_options": "this server has no web",
}
"""Answers that took no notice of them would be wrong ones."""
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MOST_NAMED = 20


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
    if isinstance(body, ChatRequest):
        _check_chat(body)
    unknown = [name if _NAME.fullmatch(name) else "?" for name in extra if name not in REFUSED]
    if unknown and settings.strict:
        raise invalid(unknown[0], f"{unknown[0]}: there is no such field: leave it out")
    return sorted(set(unknown))[:_MOST_NAMED]


def _check_chat(body: ChatRequest) -> None:
    kind = (body.response_format or {}).get("type", "text")
    if kind != "text":
        raise unsupported("response_format", f"response_format: {str(kind)[:40]!r} is not served: leave it out")
    if body.tool_choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", 'tool_choice: no call can be forced: give "auto" or "none"')
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs: it needs logprobs: true")
