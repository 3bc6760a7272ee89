"""Request schemas of OpenAI's APIs, and refusals of fields that are not supported."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticUseDefault

from lade.server import settings as limits
from lade.server.errors import NOT_FOUND, ApiError, invalid, unsupported, validation_error

_ID_BITS = 2**31


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("an unpaired surrogate is not valid text") from None
    return text


def _not_null(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


def _nullable(kind: Any) -> BeforeValidator:
    """Treat null like an absent field, which then has its default."""
    return BeforeValidator(_not_null, json_schema_input_type=kind | None)


# numbers and switches are strict, as in OpenAI's API: neither true nor "5" is a number
Flag = Annotated[StrictBool, _nullable(StrictBool)]
Choices = Annotated[StrictInt, Field(ge=1, le=limits.MAX_CHOICES)]
Tokens = Annotated[StrictInt, Field(ge=0)]
Text = Annotated[str, AfterValidator(_whole)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=_ID_BITS)]
BiasedId = Annotated[int, Field(ge=0, lt=_ID_BITS)]
"""Token id as the key of a JSON object, which is a string."""
Stop = Annotated[Text, Field(min_length=1, max_length=limits.LONGEST_STOP)]
Bias = Annotated[StrictFloat, Field(ge=-100, le=100)]


def _as_list(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > limits.MAX_MEMBERS:
        raise ValueError(f"an object should have at most {limits.MAX_MEMBERS} members")
    return value


# lists and objects are bounded, and validation stops at the first invalid item: otherwise a body of 4 MB could make a
# million errors
Object = Annotated[dict[str, Any], Field(max_length=limits.MAX_MEMBERS), BeforeValidator(_few)]
Names = Annotated[list[str], Field(fail_fast=True, max_length=limits.MAX_MEMBERS)]
Words = Annotated[list[Text], Field(fail_fast=True, max_length=limits.MAX_WORDS)]
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=limits.MAX_IDS)]
StopIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=limits.MAX_BIASES)]
Biases = Annotated[dict[BiasedId, Bias], Field(max_length=limits.MAX_BIASES), BeforeValidator(_few)]
_ListedStops = Annotated[list[Stop], Field(fail_fast=True, max_length=limits.MAX_STOPS)]
Stops = Annotated[_ListedStops, BeforeValidator(_as_list, json_schema_input_type=Stop | _ListedStops | None)]


class Model(BaseModel):
    """Base of all schemas; unknown fields are kept apart, to be reported to the client."""

    model_config = ConfigDict(
        extra="allow",
        allow_inf_nan=False,
        protected_namespaces=(),
        json_schema_extra={"maxProperties": limits.MAX_MEMBERS},
    )

    @model_validator(mode="before")
    @classmethod
    def _has_few_members(cls, value: Any) -> Any:
        return _few(value)


class StreamOptions(Model):
    """Options of a streamed answer."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Flag = False


class Trace(Model):
    """Options of this server's own extension, `lade`."""

    trace: Flag = False


class ImageUrl(Model):
    """URL of an image; only `data:` URLs are served."""

    url: str


class Part(Model):
    """A content part of a message."""

    type: str
    text: Text | None = None
    refusal: Text | None = None
    image_url: ImageUrl | None = None


Parts = Annotated[list[Part], Field(fail_fast=True, max_length=limits.MAX_PARTS)]


class PredictedOutput(Model):
    """Predicted output: text that the answer is expected to follow."""

    type: Literal["content"] = "content"
    content: Text | Parts

    @property
    def text(self) -> str:
        """All parts, concatenated."""
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class StructuredOutputs(Model):
    """Constraint on the answer, as in vLLM; exactly one field is set."""

    json_schema: Any = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: Text | None = None
    choice: Words | None = None
    grammar: Text | None = None
    whitespace: Flag = False


class BaseRequest(Model):
    """Fields that chat and text completions have in common."""

    model: str | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = Field(None, ge=1)
    n: Annotated[Choices, _nullable(Choices)] = 1
    best_of: StrictInt | None = Field(None, ge=1)
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**64)
    timeout: StrictFloat | None = Field(None, gt=0, le=limits.LONGEST_TIMEOUT_S)
    temperature: StrictFloat | None = Field(None, ge=0, le=100)
    top_p: StrictFloat | None = Field(None, gt=0, le=1)
    top_k: StrictInt | None = Field(None, ge=-1, le=_ID_BITS)
    min_p: StrictFloat | None = Field(None, ge=0, le=1)
    repetition_penalty: StrictFloat | None = Field(None, ge=0.01, le=100)
    presence_penalty: StrictFloat | None = Field(None, ge=-2, le=2)
    frequency_penalty: StrictFloat | None = Field(None, ge=-2, le=2)
    logit_bias: Biases | None = None
    stop: Stops = []
    stop_token_ids: StopIds | None = None
    min_tokens: Annotated[Tokens, _nullable(Tokens)] = 0
    ignore_eos: Flag = False
    skip_special_tokens: Flag = True
    return_token_ids: Flag = False
    cache_salt: str | None = Field(None, max_length=256)
    lookahead: Literal["auto"] | Object | None = "auto"
    prediction: PredictedOutput | None = None
    structured_outputs: StructuredOutputs | None = None
    lade: Annotated[Trace, _nullable(Trace)] = Trace()
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def most_tokens(self) -> int | None:
        """Maximum length of the answer in tokens; None if the request sets none."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """True if the stream ends with a usage event."""
        return self.stream_options is not None and self.stream_options.include_usage


class Message(Model):
    """A message; unknown fields are passed to the chat template."""

    role: str = Field(min_length=1, max_length=64)
    content: Text | Parts | None = None
    refusal: Text | None = None


class ChatRequest(BaseRequest):
    """Request body of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=limits.MAX_MESSAGES)]
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=limits.MAX_TOP_LOGPROBS)
    tools: Annotated[list[Object], Field(fail_fast=True, max_length=limits.MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    response_format: Object | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    chat_template_kwargs: Object | None = None
    generation_config: Annotated[str, Field(max_length=limits.LONGEST_SCHEMA)] | None = None
    verbosity: Any = None

    @model_validator(mode="after")
    def _leave_out_other_tools(self) -> Self:
        """Drop tools that are not called by JSON; they are reported as unknown fields."""
        kinds = [tool.get("type") or "function" for tool in self.tools or ()]
        others = [kind for kind in kinds if kind != "function"]
        if self.tools and others and self.model_extra is not None:
            self.model_extra.update({f"tools.{kind if isinstance(kind, str) else '?'}": "" for kind in others})
            self.tools = [tool for tool, kind in zip(self.tools, kinds, strict=True) if kind == "function"] or None
        return self

    @property
    def most_tokens(self) -> int | None:
        """Maximum length of the answer in tokens; None if the request sets none."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(BaseRequest):
    """Request body of `/v1/completions`."""

    prompt: (
        Text
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=limits.MAX_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=limits.MAX_PROMPTS)]
    )
    max_tokens: StrictInt | None = Field(None, ge=0)
    logprobs: StrictInt | None = Field(None, ge=0, le=limits.MAX_TOP_LOGPROBS)
    echo: Flag = False


REFUSED = {
    "audio": "audio output is not supported",
    "background": "background responses are not supported",
    "chat_template": "templates in requests are not supported: start the server with --chat-template",
    "conversation": "conversations are not stored: send all messages",
    "function_call": "deprecated: use tools",
    "functions": "deprecated: use tools",
    "grammar": "use structured_outputs with a Lark grammar",
    **{f"guided_{kind}": f"use structured_outputs with {kind}" for kind in ("choice", "grammar", "json", "regex")},
    "previous_response_id": "responses are not stored: send all messages",
    "prompt_logprobs": "use /v1/completions with echo and logprobs",
    "suffix": "insertion is not supported",
    "use_beam_search": "beam search is not supported",
    "web_search_options": "web search is not supported",
}
"""Fields that cannot be ignored without a wrong answer."""
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
"""Fields that are accepted for compatibility, with the values that ask for nothing."""
_UNNAMED = "dummy"  # model name that huggingface_hub sends if the user names none
_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MAX_NAMED = 20


def check_model(name: str | None, settings: limits.Settings) -> None:
    """Raise `ApiError` for a model that is not served."""
    if name is not None and name not in (_UNNAMED, *settings.names):
        raise not_served(name, settings)


def not_served(name: str, settings: limits.Settings) -> ApiError:
    """Return the error for a model that is not served."""
    why = f"model {name[:100]!r} is not served: give one of {', '.join(settings.names)}"
    return ApiError(404, NOT_FOUND, why, param="model", code="model_not_found")


def check(body: BaseRequest, settings: limits.Settings) -> list[str]:
    """Return the names of unknown fields, which are ignored; raise `ApiError` for those that must not be."""
    extra = body.model_extra or {}
    for name, why in REFUSED.items():
        value = extra.get(name)
        if value or type(value) is int:  # prompt_logprobs: 0 requests logprobs, too
            raise unsupported(name, why)
    modalities = extra.get("modalities")
    if modalities and modalities != ["text"]:
        raise unsupported("modalities", "only text is supported")
    if body.best_of is not None and body.best_of > body.n:
        why = f"{body.best_of} exceeds n={body.n}, and choices are not ranked: request n={body.best_of}"
        raise unsupported("best_of", f"{why}, and choose among them")
    if isinstance(body, ChatRequest) and body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs: true")
    unknown = [name if _NAME.fullmatch(name) else "?" for name in extra if name not in (*REFUSED, "modalities")]
    if unknown and settings.strict:
        raise invalid(unknown[0], "unknown field: leave it out")
    return unknown + [name for name in REFUSED if extra.get(name) == {}]


def without_effect(requested: BaseRequest) -> list[str]:
    """Return the names of known fields that are set but have no effect."""
    given = {name: _value(requested, name) or None for name in _WITHOUT_EFFECT}
    return [name for name, value in given.items() if value not in (None, *_WITHOUT_EFFECT[name])]


def unused_by_template(body: ChatRequest, template: str) -> list[str]:
    """Return the names of template arguments that the chat template does not use."""
    unused = [f"chat_template_kwargs.{name}" for name in body.chat_template_kwargs or {} if name not in template]
    return unused + ["reasoning_effort"] * (body.reasoning_effort is not None and "reasoning_effort" not in template)


def header(names: Iterable[str]) -> str:
    """Return the value of the header that names ignored fields."""
    return ", ".join(sorted(set(names))[:_MAX_NAMED])


def _value(requested: Any, name: str) -> Any:
    """Return the value of a field, or of a nested field; None if it is absent."""
    return functools.reduce(lambda inner, each: getattr(inner, each, None), name.split("."), requested)


def refuse(requested: BaseRequest, refused: Mapping[str, str]) -> None:
    """Raise `ApiError` for several choices, or a field of another API that cannot be served, with its remedy."""
    for name, remedy in refused.items():
        if (requested.model_extra or {}).get(name):
            raise unsupported(name, remedy)
    if requested.n != 1:
        raise unsupported("n", "this API has one choice: use /v1/chat/completions")


def chat_request(requested: BaseRequest, **fields: Any) -> ChatRequest:
    """Convert a request of another API to a chat request with these fields, of which None stands for absent ones.

    Shared and unknown fields are copied, to be checked by the same rules.

    Raises:
        ApiError: the chat API does not accept a value.
    """
    shared = {name: getattr(requested, name) for name in BaseRequest.model_fields if name in requested.model_fields_set}
    given = {name: value for name, value in fields.items() if value is not None}
    whole = {**(requested.model_extra or {}), **shared, **given}
    try:
        return ChatRequest.model_validate(whole)
    except ValidationError as problem:
        raise validation_error(problem.errors(), whole) from None
