"""Rendering of conversations and their images by the model's chat template."""

from __future__ import annotations

import base64
import io
import re
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import jinja2

from lade.model.prepared import IMAGE_FORMATS
from lade.server.errors import ApiError, invalid, unsupported
from lade.server.schemas import ChatRequest, Message
from lade.server.serialization import decoded
from lade.server.served_model import ServedModel, TextEncoder, TextTooLongError
from lade.server.settings import MAX_IMAGES, MAX_PIXELS

_FORMATS = f"{', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}"


class Images:
    """Decodes the images of one request within common limits: a few kilobytes can expand to gigabytes."""

    def __init__(self) -> None:
        self._count = self._pixels = 0

    def read(self, url: str, place: str) -> Any:
        """Return the image of a `data:` URL, in RGB.

        Args:
            url: URL such as `data:image/png;base64,iVBOR...`.
            place: path of the field, for errors.

        Raises:
            ApiError: not a data URL or image, too large, too many images, or Pillow is missing.
        """
        head, comma, data = url.partition(",")
        if not head.startswith("data:") or not comma or not head.endswith(";base64"):
            raise unsupported(place, "image URLs are not fetched: send  data:image/png;base64,...")
        if find_spec("PIL") is None:
            raise unsupported(place, "this server cannot read images: it needs Pillow (pip install pillow)")
        from PIL import Image as pillow

        self._count += 1
        if self._count > MAX_IMAGES:
            raise invalid(place, f"there are more than {MAX_IMAGES} images: send fewer")
        try:
            with pillow.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=IMAGE_FORMATS) as picture:
                self._pixels += picture.width * picture.height
                if self._pixels > MAX_PIXELS:
                    raise invalid(place, f"the images have more than {MAX_PIXELS} pixels together: send smaller ones")
                return picture.convert("RGB")
        except ApiError:
            raise
        except Exception as problem:  # noqa: BLE001 - whatever a decoder makes of what a client has sent
            why = f"not a readable image ({type(problem).__name__}): send a {_FORMATS}"
            raise invalid(place, why) from None


RESERVED = frozenset(
    """
    add_generation_prompt chat_template continue_final_message conversation max_length messages padding
    return_assistant_tokens_mask return_dict return_tensors tokenize tokenizer_kwargs tools truncation
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
"""Arguments of `apply_chat_template` that are not the template's, or that have fields of their own."""
_LOOPS_OVER_PARTS = re.compile(r"for\s+\w+\s+in\s+\w+(?:\.content|\[['\"]content['\"]\])")
_MAX_REASON = 240
_INSTRUCTIONS = ("system", "developer")


class ChatTemplate:
    """The chat template of a model.

    Args:
        model: the served model, with its tokenizer and, if it takes images, its processor.
        encoder: encoder of rendered texts.
        defaults: default arguments of the template.
    """

    def __init__(self, model: ServedModel, encoder: TextEncoder, defaults: Mapping[str, Any]) -> None:
        self._model, self._encoder, self._defaults = model, encoder, defaults
        self._image_lock = threading.Lock()  # processors keep per-call state
        self._text = model.chat_template
        self._takes_parts = bool(_LOOPS_OVER_PARTS.search(self._text))
        self._knows_developer = "developer" in self._text

    def encode(self, body: ChatRequest) -> tuple[list[int], Mapping[str, Any]]:
        """Return the ids of a conversation, and the arguments of `generate` for its images.

        Raises:
            ApiError: there is no template, it raises, or it cannot render the content.
            TextTooLongError: the rendered text is too long for the model.
        """
        if not self._text:
            why = "this model has no chat template: use /v1/completions, or start the server with --chat-template"
            raise invalid("messages", why, "no_chat_template")
        arguments = self._arguments(body)
        if any(_has_images(each) for each in body.messages):
            with self._image_lock:  # also bounds the memory of decoded images
                return self._with_images(self._messages(body), arguments)
        messages = self._messages(body)
        try:
            return self._apply(messages, arguments), {}
        except TextTooLongError:
            raise
        except Exception as problem:
            merged = _merged(messages)
            if len(merged) == len(messages):
                raise _rejected(problem) from problem
        try:  # for templates that accept a single, leading system message
            return self._apply(merged, arguments), {}
        except TextTooLongError:
            raise
        except Exception as problem:
            raise _rejected(problem) from problem

    def _apply(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[int]:
        apply = self._model.tokenizer.apply_chat_template
        if self._encoder.span is None:
            ids: list[int] = apply(messages, **arguments, tokenize=True, return_dict=False)
            return ids
        return self._encoder.ids(apply(messages, **arguments, tokenize=False), add_special_tokens=False)

    def _with_images(
        self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]
    ) -> tuple[list[int], Mapping[str, Any]]:
        encode = self._model.encode_images
        if encode is None:
            raise invalid("messages", "this model takes no images: leave them out", "unsupported_parameter")
        try:
            return encode(messages, arguments, self._encoder.check)
        except TextTooLongError:
            raise
        except Exception as problem:
            raise _rejected(problem) from problem

    def _arguments(self, body: ChatRequest) -> dict[str, Any]:
        given = body.chat_template_kwargs or {}
        for name in sorted(RESERVED & set(given)):
            raise invalid(f"chat_template_kwargs.{name}", f"{name} is not a template variable: leave it out")
        continues = body.continue_final_message
        if continues and body.messages[-1].role != "assistant":
            why = "only an assistant message at the end can be continued: leave out continue_final_message"
            raise invalid("continue_final_message", why)
        effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        return {
            **self._defaults,
            **effort,
            **given,
            "tools": None if body.tool_choice == "none" else body.tools or None,
            "add_generation_prompt": body.add_generation_prompt and not continues,
            "continue_final_message": continues,
        }

    def _messages(self, body: ChatRequest) -> list[dict[str, Any]]:
        images = Images()
        return [self._message(each, f"messages[{number}]", images) for number, each in enumerate(body.messages)]

    def _message(self, message: Message, place: str, images: Images) -> dict[str, Any]:
        """Return a message as templates expect it."""
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        # clients echo answers with all null fields, which templates may misread
        others = {name: value for name, value in (message.model_extra or {}).items() if value is not None}
        made = {**others, "role": role, "content": self._content(message, f"{place}.content", images)}
        thought = made.get("reasoning_content") or made.get("reasoning")
        if thought is not None:
            made |= {"reasoning_content": thought, "reasoning": thought}
        if isinstance(made.get("tool_calls"), list):
            made["tool_calls"] = [_with_parsed_arguments(call) for call in made["tool_calls"]]
        return made

    def _content(self, message: Message, place: str, images: Images) -> str | list[dict[str, Any]]:
        if not isinstance(message.content, list):
            return message.content or message.refusal or ""
        parts: list[dict[str, Any]] = []
        for number, part in enumerate(message.content):
            where = f"{place}[{number}]"
            text = part.refusal if part.type == "refusal" else part.text
            if part.type in ("text", "refusal") and text is not None:
                parts.append({"type": "text", "text": text})
            elif part.type == "image_url" and part.image_url is not None:
                if self._model.encode_images is None:
                    raise invalid(where, "this model takes no images: leave them out", "unsupported_parameter")
                parts.append({"type": "image", "image": images.read(part.image_url.url, f"{where}.image_url.url")})
            else:
                why = f"parts of type {part.type[:40]!r} are not supported: send text or image_url"
                raise invalid(where, why, "unsupported_parameter")
        if self._takes_parts or any(part["type"] == "image" for part in parts):
            return parts
        return "".join(part["text"] for part in parts)


def _has_images(message: Message) -> bool:
    return isinstance(message.content, list) and any(part.type == "image_url" for part in message.content)


def _merged(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Join the leading system messages with blank lines."""
    count = next((at for at, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS), len(messages))
    if count < 2 or not all(isinstance(each["content"], str) for each in messages[:count]):
        return list(messages)
    text = "\n\n".join(each["content"] for each in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def _with_parsed_arguments(call: Any) -> Any:
    """Parse the arguments of function calls, which clients send as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = decoded(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _rejected(problem: Exception) -> ApiError:
    if isinstance(problem, ApiError):
        return problem
    words = " ".join(str(problem).split())[:_MAX_REASON] or type(problem).__name__
    kind = "" if isinstance(problem, jinja2.TemplateError) else f"{type(problem).__name__}: "
    return invalid("messages", f"the chat template rejects this conversation: {kind}{words}", "chat_template_error")
