"""What requests may hold: OpenAI's fields, and those that other servers have added under the same names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from lade.server.settings import (
    LONGEST_STOP,
    MOST_BIASES,
    MOST_CHOICES,
    MOST_MESSAGES,
    MOST_PROMPTS,
    MOST_STOPS,
    MOST_TOOLS,
    MOST_TOP_LOGPROBS,
)

_ID_BITS = 2**31


def _whole(text: str) -> str:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("half a character, which JSON can spell, is no text")
    return text


Text = Annotated[str, AfterValidator(_whole)]
TokenId = Annotated[int, Field(ge=0, lt=_ID_BITS)]
Stop = Annotated[Text, Field(min_length=1, max_length=LONGEST_STOP)]
Bias = Annotated[float, Field(ge=-100, le=100)]


def _as_list(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


Stops = Annotated[list[Stop], BeforeValidator(_as_list, json_schema_input_type=Stop | list[Stop] | None)]


class Model(BaseModel):
    """Base of all: what is not known is kept apart, to be named to the client."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Model):
    """What a stream has besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Trace(Model):
    """What only this server can tell."""

    trace: bool = False


class ImageUrl(Model):
    """Where an image is; only `data:` is."""

    url: str


class Part(Model):
    """A part of a message."""

    type: str
    text: Text | None = None
    image_url: ImageUrl | None = None


class Prediction(Model):
    """A text that the answer is expected to follow."""

    type: Literal["content"] = "content"
    content: Text | list[Part]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class StructuredOutputs(Model):
    """What an answer may be, as vLLM has it: one of them."""

    json_schema: Any = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: list[Text] | None = None
    grammar: Text | None = None
    whitespace: bool = False


class Decoding(Model):
    """What chats and completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=_ID_BITS)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenId, Bias] | None = Field(None, max_length=MOST_BIASES)
    stop: Annotated[list[Stop], BeforeValidator(_as_list, json_schema_input_type=Stop | list[Stop] | None)] = Field(
        [], max_length=MOST_STOPS
    )
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MOST_BIASES)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    cache_salt: str | None = Field(None, max_length=256)
    lookahead: Literal["auto"] | dict[str, Any] | None = "auto"
    prediction: Prediction | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = None
    guided_grammar: Text | None = None
    lade: Trace = Trace()
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
    content: Text | list[Part] | None = None


class ChatRequest(Decoding):
    """Of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    tools: list[dict[str, Any]] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    generation_config: str | None = None
    verbosity: Any = None

    @property
    def most_tokens(self) -> int | None:
        """Of an answer, if the request says."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(Decoding):
    """Of `/v1/completions`."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, max_length=MOST_PROMPTS)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MOST_PROMPTS)]
    )
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP_LOGPROBS)
    echo: bool = False
