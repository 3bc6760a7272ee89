"""What a request to `/v1/responses` may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt

from lade.server.schemas import Decoding, Model, Names, Object, Text
from lade.server.settings import MOST_MESSAGES, MOST_PARTS, MOST_TOOLS


class InputPart(Model):
    """A part of a message, of an output, or of a thought."""

    type: str
    text: Text | None = None
    refusal: Text | None = None
    image_url: str | None = None


InputParts = Annotated[list[InputPart], Field(fail_fast=True, max_length=MOST_PARTS)]


class InputItem(Model):
    """An item: a message, a call of a tool, its output, or a thought. Which fields it needs, its type decides."""

    type: str = Field("message", max_length=64)
    role: str | None = Field(None, min_length=1, max_length=64)
    content: Text | InputParts | None = None
    summary: InputParts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Text | None = None
    input: Text | None = None
    output: Text | InputParts | None = None


class Reasoning(Model):
    """How much thought is wanted."""

    effort: str | None = None
    summary: Any = None


class TextOptions(Model):
    """The form of the text."""

    format: Object | None = None
    verbosity: Any = None


Tools = Annotated[list["Tool"], Field(fail_fast=True, max_length=MOST_TOOLS)]


class Tool(Model):
    """A tool; functions are what is served, alone or in namespaces."""

    type: str = Field(max_length=64)
    name: str | None = None
    tools: Tools | None = None
    description: str | None = None
    parameters: Object | None = None
    strict: StrictBool | None = None


class ResponsesRequest(Decoding):
    """Of `/v1/responses`."""

    input: Text | Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES)]
    instructions: Text | None = None
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    tools: Tools | None = None
    tool_choice: Literal["auto", "none", "required"] | Object | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: Names | None = None
    client_metadata: Any = None
    truncation: Any = None
    prompt_cache_retention: Any = None
