"""What a request to `/v1/messages` may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from lade.server.schemas import Decoding, Model, Object, Stop, Text
from lade.server.settings import MOST_MESSAGES, MOST_PARTS, MOST_STOPS, MOST_TOOLS

Blocks = Annotated[list["Block"], Field(fail_fast=True, max_length=MOST_PARTS)]


class Source(Model):
    """Of an image, or of a document."""

    type: str = Field(max_length=64)
    media_type: str | None = None
    data: Text | None = None
    url: str | None = None
    content: Text | Blocks | None = None


class Block(Model):
    """A part of a message. Which fields it needs, its type decides."""

    type: str = Field(max_length=64)
    text: Text | None = None
    thinking: Text | None = None
    source: Source | None = None
    title: Text | None = None
    context: Text | None = None
    citations: Any = None
    id: str | None = None
    name: str | None = None
    input: Object | None = None
    tool_use_id: str | None = None
    content: Text | Blocks | None = None
    is_error: StrictBool | None = None


class Turn(Model):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Text | Blocks


class Tool(Model):
    """A tool; those that a client runs itself are what is served."""

    name: str
    type: str | None = Field(None, max_length=64)
    description: str | None = None
    input_schema: Object | None = None
    strict: StrictBool | None = None
    cache_control: Any = None


class ToolChoice(Model):
    """Whether tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool | None = None


class Thinking(Model):
    """Whether the model is to think first; all types but one say in some way that it is."""

    type: str = Field(max_length=64)
    budget_tokens: StrictInt | None = None


class OutputConfig(Model):
    """The form of the answer."""

    format: Object | None = None


class CountRequest(Decoding):
    """Of `/v1/messages/count_tokens`."""

    messages: Annotated[list[Turn], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    system: Text | Blocks | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Object | None = None
    chat_template_kwargs: Object | None = None
    cache_control: Any = None


class MessagesRequest(CountRequest):
    """Of `/v1/messages`."""

    max_tokens: StrictInt = Field(ge=1)
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)] | None = None
