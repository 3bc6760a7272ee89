"""What requests may hold: OpenAI's fields, and those that other servers have added under the same names."""

from __future__ import annotations

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
    model_validator,
)
from pydantic_core import PydanticUseDefault

from lade.server.settings import (
    LONGEST_SCHEMA,
    LONGEST_STOP,
    MOST_BIASES,
    MOST_CHOICES,
    MOST_IDS,
    MOST_MEMBERS,
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_PROMPTS,
    MOST_STOPS,
    MOST_TOOLS,
    MOST_TOP_LOGPROBS,
    MOST_WORDS,
)

_ID_BITS = 2**31


def _whole(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half a character, which JSON can spell, is no text") from None
    return text


def _not_null(value: Any) -> Any:
    if value is None:
        raise PydanticUseDefault
    return value


def _nullable(kind: Any) -> BeforeValidator:
    """Has a null be as good as a field that is left out, which then has its default."""
    return BeforeValidator(_not_null, json_schema_input_type=kind | None)


# numbers and switches are strict, as in OpenAI's API: neither true nor "5" is a number
Flag = Annotated[StrictBool, _nullable(StrictBool)]
Choices = Annotated[StrictInt, Field(ge=1, le=MOST_CHOICES)]
Tokens = Annotated[StrictInt, Field(ge=0)]
Text = Annotated[str, AfterValidator(_whole)]
TokenId = Annotated[StrictInt, Field(ge=0, lt=_ID_BITS)]
BiasedId = Annotated[int, Field(ge=0, lt=_ID_BITS)]
"""A name of a JSON object, and so a text."""
Stop = Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]
Bias = Annotated[StrictFloat, Field(ge=-100, le=100)]


def _as_list(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST_MEMBERS:
        raise ValueError(f"an object should have at most {MOST_MEMBERS} members")
    return value


# every list and object has a greatest length, and ends at the first wrong item: else 4 MB of wrong ones make a million
# errors
Object = Annotated[dict[str, Any], Field(max_length=MOST_MEMBERS), BeforeValidator(_few)]
Names = Annotated[list[str], Field(fail_fast=True, max_length=MOST_MEMBERS)]
Words = Annotated[list[Text], Field(fail_fast=True, max_length=MOST_WORDS)]
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MOST_IDS)]
StopIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MOST_BIASES)]
Biases = Annotated[dict[BiasedId, Bias], Field(max_length=MOST_BIASES), BeforeValidator(_few)]
_ListedStops = Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)]
Stops = Annotated[_ListedStops, BeforeValidator(_as_list, json_schema_input_type=Stop | _ListedStops | None)]


class Model(BaseModel):
    """Base of all: what is not known is kept apart, to be named to the client."""

    model_config = ConfigDict(
        extra="allow",
        allow_inf_nan=False,
        protected_namespaces=(),
        json_schema_extra={"maxProperties": MOST_MEMBERS},
    )

    @model_validator(mode="before")
    @classmethod
    def _has_few_members(cls, value: Any) -> Any:
        return _few(value)


class StreamOptions(Model):
    """What a stream has besides text."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Flag = False


class Trace(Model):
    """What only this server can tell."""

    trace: Flag = False


class ImageUrl(Model):
    """Where an image is; only `data:` is."""

    url: str


class Part(Model):
    """A part of a message."""

    type: str
    text: Text | None = None
    refusal: Text | None = None
    image_url: ImageUrl | None = None


Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MOST_PARTS)]


class Prediction(Model):
    """A text that the answer is expected to follow."""

    type: Literal["content"] = "content"
    content: Text | Parts

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class StructuredOutputs(Model):
    """What an answer may be, as vLLM has it: one of them."""

    json_schema: Any = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: Text | None = None
    choice: Words | None = None
    grammar: Text | None = None
    whitespace: Flag = False


class Decoding(Model):
    """What chats and completions have in common."""

    model: str | None = None
    stream: Flag = False
    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = Field(None, ge=1)
    n: Annotated[Choices, _nullable(Choices)] = 1
    best_of: StrictInt | None = Field(None, ge=1)
    seed: StrictInt | None = Field(None, ge=-(2**63), lt=2**64)
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
    prediction: Prediction | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Text | None = None
    guided_choice: Words | None = None
    guided_grammar: Text | None = None
    lade: Annotated[Trace, _nullable(Trace)] = Trace()
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def most_tokens(self) -> int | None:
        """Of an answer, if the request says."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the figures."""
        return self.stream_options is not None and self.stream_options.include_usage


class Message(Model):
    """A message; what is not known here is for the chat template."""

    role: str = Field(min_length=1, max_length=64)
    content: Text | Parts | None = None
    refusal: Text | None = None


class ChatRequest(Decoding):
    """Of `/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    tools: Annotated[list[Object], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    response_format: Object | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    chat_template_kwargs: Object | None = None
    generation_config: Annotated[str, Field(max_length=LONGEST_SCHEMA)] | None = None
    verbosity: Any = None

    @model_validator(mode="after")
    def _leave_out_other_tools(self) -> Self:
        """Those that a model calls by something else than JSON; they are named as fields that nobody knows."""
        kinds = [tool.get("type") or "function" for tool in self.tools or ()]
        others = [kind for kind in kinds if kind != "function"]
        if self.tools and others and self.model_extra is not None:
            self.model_extra.update({f"tools.{kind if isinstance(kind, str) else '?'}": "" for kind in others})
            self.tools = [tool for tool, kind in zip(self.tools, kinds, strict=True) if kind == "function"] or None
        return self

    @property
    def most_tokens(self) -> int | None:
        """Of an answer, if the request says."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Decoding):
    """Of `/v1/completions`."""

    prompt: (
        Text
        | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
        | Ids
        | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)]
    )
    max_tokens: StrictInt | None = Field(None, ge=0)
    logprobs: StrictInt | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    echo: Flag = False
