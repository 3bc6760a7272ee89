"""Rendering of conversations and their images by the model's chat template."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from itertools import product
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from lade.files import IMAGE_FORMATS
from lade.server.errors import ApiError, invalid, unsupported
from lade.server.schemas import ChatRequest, Message
from lade.server.serialization import decoded
from lade.server.served_model import ServedModel
from lade.server.settings import MAX_IMAGES, MAX_PIXELS

_FORMATS = f"{', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]}"


class Images:
    """Decodes the images of one request within common limits: a few kilobytes can expand to gigabytes."""

    def __init__(self) -> None:
        self._count = self._pixels = 0

    def read(self, url: str, place: str) -> Any:
        """Return the image of a URL such as `data:image/png;base64,iVBOR...`, in RGB; raise `ApiError` for another."""
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
            raise invalid(place, f"not a readable image ({type(problem).__name__}): send a {_FORMATS}") from None


RESERVED = frozenset(
    """
    add_generation_prompt chat_template continue_final_message conversation max_length messages padding
    return_assistant_tokens_mask return_dict return_tensors sanitize_control_tokens tokenize tokenizer_kwargs tools
    truncation
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes
)
"""Arguments of `apply_chat_template` that are not the template's, or that have fields of their own."""
_MAX_REASON = 240
_INSTRUCTIONS = ("system", "developer")

_SHOWN, _KEY = "qzxshown", "qzxkey"  # texts that no template holds
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_LONG = "call_a1b2c3d4e5f6a7b8c9d0"

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class CallForm:
    """The form of messages with tool calls."""

    short_ids: bool = False  # nine letters or digits, as with Mistral's templates
    content: str | None = ""  # of a message that has calls and no text
    parsed: bool = True  # arguments are objects; otherwise JSON texts


class TemplateForms:
    """The forms in which a chat template takes messages, found out by rendering small conversations.

    Templates differ in what they show: content as text or as parts, the arguments of tool calls as an object or as JSON
    text, calls of messages without content only, ids of nine letters. In another form most of them raise, and some drop
    the message without a word.
    """

    def __init__(self, render: Callable[[Messages], str]) -> None:
        self._render = render  # may raise anything
        self._parts: dict[str, tuple[bool, bool]] = {}

    def takes(self, role: str) -> tuple[bool, bool]:
        """Return whether messages of this role may have a text as their content, and whether a list of parts."""
        if role not in self._parts:
            parts = [{"type": "text", "text": _SHOWN}, {"type": "text", "text": _SHOWN[::-1]}]
            shown = self._shown(_around(role, parts))
            whole = _SHOWN in shown and _SHOWN[::-1] in shown and not re.search("['\"]type['\"]", shown)
            # A template that shows neither is told what is usual.
            self._parts[role] = _SHOWN in self._shown(_around(role, _SHOWN)) or not whole, whole
        return self._parts[role]

    @cached_property
    def calls(self) -> CallForm:
        """The first form in which a call is shown as it should be; the usual one if there is none."""
        for short_ids, content, parsed in product((False, True), ("", None), (True, False)):
            form = CallForm(short_ids, content, parsed)
            call = {"id": _LONG, "type": "function", "function": {"name": "f", "arguments": {_KEY: _SHOWN}}}
            user = {"role": "user", "content": self.content("user", "a")}
            calling = {"role": "assistant", "content": None if content is None else self.content("assistant", content)}
            result = {"role": "tool", "tool_call_id": _LONG, "name": "f", "content": self.content("tool", "b")}
            calling["tool_calls"] = [_with_form(call, form)]
            shown = self._shown([user, calling, _with_id(result, form)])
            other_language = f"'{_KEY}'" in shown or f'\\"{_KEY}' in shown or (content is None and "None" in shown)
            if _SHOWN in shown and not other_language:
                return form
        return CallForm()

    def content(self, role: str, text: str) -> str | list[dict[str, Any]]:
        """Return a text as the content of a message of this role."""
        return text if self.takes(role)[0] else [{"type": "text", "text": text}]

    def _shown(self, messages: Messages) -> str:
        try:
            return self._render(messages)
        except Exception:  # noqa: BLE001 - whatever a template raises: it does not show these
            return ""


class ChatTemplate:
    """The chat template of a model, with default arguments."""

    def __init__(self, model: ServedModel, defaults: Mapping[str, Any]) -> None:
        self._model, self._defaults = model, defaults
        self._image_lock = threading.Lock()  # processors keep per-call state
        self._text = model.chat_template
        self._forms = TemplateForms(lambda messages: self._rendered(messages, self._defaults))
        self._knows_developer = "developer" in self._text

    def encode(self, body: ChatRequest) -> tuple[list[int], Mapping[str, Any]]:
        """Return its ids, and arguments of `generate` for its images; raise `ApiError` for what cannot be rendered."""
        if not self._text:
            why = "this model has no chat template: use /v1/completions, or start the server with --chat-template"
            raise invalid("messages", why, "no_chat_template")
        arguments = self._arguments(body)
        contents = [each.content for each in body.messages if isinstance(each.content, list)]
        if any(part.type == "image_url" for parts in contents for part in parts):
            with self._image_lock:  # also bounds the memory of decoded images
                messages, encode = self._messages(body), self._model.encode_images
                assert encode is not None  # else the image was refused
                try:
                    return encode(messages, arguments)
                except Exception as problem:
                    raise _rejected(problem) from problem
        messages = self._messages(body)
        try:
            return self._apply(messages, arguments), {}
        except Exception as problem:
            merged = _merged(messages)
            if len(merged) == len(messages):
                raise _rejected(problem) from problem
        try:  # for templates that accept a single, leading system message
            return self._apply(merged, arguments), {}
        except Exception as problem:
            raise _rejected(problem) from problem

    def _apply(self, messages: Messages, arguments: Mapping[str, Any]) -> list[int]:
        return self._model.ids(self._rendered(messages, arguments), add_special_tokens=False)

    def _rendered(self, messages: Messages, arguments: Mapping[str, Any]) -> str:
        tokenizer = self._model.tokenizer
        if all(each["content"] is not None for each in messages):
            text: str = tokenizer.apply_chat_template(messages, **arguments, tokenize=False)
            return text
        # Some templates ask whether content is none, and from transformers 5.24 on the above leaves it out then.
        template = tokenizer.get_chat_template(None, arguments.get("tools"))
        variables = {**tokenizer.special_tokens_map, **arguments}
        rendered: Any = render_jinja_template([list(map(dict, messages))], chat_template=template, **variables)
        return str(rendered[0][0])

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
        made = {**others, "role": role, "content": self._content(message, role, f"{place}.content", images)}
        thought = made.get("reasoning_content") or made.get("reasoning")
        if thought is not None:
            made |= {"reasoning_content": thought, "reasoning": thought}
        if isinstance(made.get("tool_calls"), list):
            form = self._forms.calls
            made["tool_calls"] = [_with_form(call, form) for call in made["tool_calls"]]
            if form.content is None and made["tool_calls"] and not (message.content or message.refusal):
                made["content"] = None
        return _with_id(made, self._forms.calls) if role == "tool" else made

    def _content(self, message: Message, role: str, place: str, images: Images) -> str | list[dict[str, Any]]:
        if not isinstance(message.content, list):
            return self._forms.content(role, message.content or message.refusal or "")
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
        if self._forms.takes(role)[1] or any(part["type"] == "image" for part in parts):
            return parts
        return "".join(part["text"] for part in parts)


def _around(role: str, content: Any) -> Messages:
    """Return a conversation with a message of this role at the place where templates expect one."""
    message, user = {"role": role, "content": content}, {"role": "user", "content": content}
    return [user] if role == "user" else [message, user] if role == "system" else [user, message]


def _with_form(call: Any, form: CallForm) -> Any:
    """Return a tool call as clients send it in another form.

    Clients send arguments as JSON text, as an object, as nothing at all for a call without any, or encoded twice.
    Arguments that are no JSON stay a text, in an object for templates that need one.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    text, value = _text_and_value(function.get("arguments"))
    arguments = text if not form.parsed else value if isinstance(value, dict) else {"arguments": value}
    made = {**call, "function": {**function, "arguments": arguments}}
    if form.short_ids and isinstance(call.get("id"), str):
        made["id"] = _short(call["id"])
    return made


def _text_and_value(arguments: Any) -> tuple[str, Any]:
    """Return arguments as JSON text, the client's own if it is one, and as what it says."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            value = decoded(arguments)
        except (ValueError, RecursionError):
            return arguments, arguments
        return _text_and_value(value) if isinstance(value, str) else (arguments, value)
    value = {} if arguments is None or isinstance(arguments, str) else arguments
    return json.dumps(value, ensure_ascii=False), value


def _with_id(message: dict[str, Any], form: CallForm) -> dict[str, Any]:
    """Return a tool's result with the id that its call has in this form."""
    given = message.get("tool_call_id")
    return {**message, "tool_call_id": _short(given)} if form.short_ids and isinstance(given, str) else message


def _short(given: str) -> str:
    return given if _SHORT_ID.fullmatch(given) else hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]


def _merged(messages: Messages) -> list[Mapping[str, Any]]:
    """Join the leading system messages with blank lines."""
    count = next((at for at, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS), len(messages))
    if count < 2 or not all(isinstance(each["content"], str) for each in messages[:count]):
        return list(messages)
    text = "\n\n".join(each["content"] for each in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]


def _rejected(problem: Exception) -> ApiError:
    if isinstance(problem, ApiError):
        return problem
    words = " ".join(str(problem).split())[:_MAX_REASON] or type(problem).__name__
    kind = "" if isinstance(problem, jinja2.TemplateError) else f"{type(problem).__name__}: "
    return invalid("messages", f"the chat template rejects this conversation: {kind}{words}", "chat_template_error")
