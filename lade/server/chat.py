"""`/v1/chat/completions`: preprocessing of chat requests, and their format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lade.grammar import Grammar
from lade.server.answer import ChunkFormatter, Preprocessor
from lade.server.choice import Choice, ChoiceDelta, EncodedPrompt, RequestOutput
from lade.server.errors import unsupported
from lade.server.output_parser import MarkupParser, Parts, PlainParser
from lade.server.sampling_parameters import with_generation_config
from lade.server.schemas import ChatRequest
from lade.server.service import Serving
from lade.server.structured_output import CHAT_NAMES, FormatNames, message_grammar, requested_calls, requested_grammar
from lade.stats import Step


class ChatPreprocessor(Preprocessor):
    """Renders a conversation by the chat template; one prompt.

    Raises:
        ApiError: the request's `generation_config` is invalid.
    """

    body: ChatRequest

    def __init__(self, body: ChatRequest, names: FormatNames = CHAT_NAMES) -> None:
        self._names = names
        self.body = with_generation_config(body)
        self.top_logprobs = (body.top_logprobs or 0) if body.logprobs else None

    def keeps_special_tokens(self, serving: Serving) -> bool:
        """See `Preprocessor.keeps_special_tokens`."""
        return serving.markup.has_special_tokens

    def prompts(self, serving: Serving) -> list[EncodedPrompt]:
        """See `Preprocessor.prompts`."""
        ids, media = serving.template.encode(self.body)
        return [EncodedPrompt(ids, media, serving.model.tokenizer.decode(ids))]

    def parser(self, prompt: EncodedPrompt, serving: Serving) -> PlainParser | MarkupParser:
        """See `Preprocessor.parser`."""
        tools = self.body.tools if self.body.tool_choice != "none" else None
        return serving.markup.parser(prompt.text, tools)

    def grammar(self, prompt: EncodedPrompt, serving: Serving) -> tuple[Grammar, str] | None:
        """See `Preprocessor.grammar`; tool calls follow their schemas where these can be compiled."""
        body, grammars, markup = self.body, serving.grammars, serving.markup
        form, param = requested_grammar(body, self._names) or (None, "tool_choice")
        if form is None and body.tool_choice in (None, "auto", "none"):
            continues = body.ignore_eos or body.min_tokens
            if not body.tools or continues or not grammars.available or markup.has_other_reasoning:
                return None
        elif markup.has_other_reasoning:
            raise unsupported(param, "grammars do not support this model's reasoning markup: leave it out")
        vocabulary = grammars.vocabulary(param)
        if form is not None:
            grammars.require(form, param)  # alone first, so that an error names the format, not the whole message
        calls = requested_calls(body, vocabulary)
        made = message_grammar(serving.model.chat_template, prompt.text, form, calls, vocabulary)
        return None if made is None else (made, param)


class ChatFormatter(ChunkFormatter):
    """Chat completions: `chat.completion` objects and chunks."""

    endpoint = "chat"
    id_prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, output: RequestOutput) -> None:
        super().__init__(output)
        self._returns_ids = output.body.return_token_ids

    def whole(self) -> dict[str, Any]:
        """See `Formatter.whole`."""
        return {**super().whole(), **self._prompt_ids(self.output.choices[0])}

    def first(self) -> Iterator[bytes]:
        """See `Formatter.first`; the chunk of a choice that has its role."""
        for choice in self.output.choices:
            delta = {"role": "assistant", "content": ""}
            first = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self.chunk(first, self._prompt_ids(choice))

    def _prompt_ids(self, choice: Choice) -> dict[str, Any]:
        """Return the ids of the prompt where vLLM has them: beside the choices, which share it."""
        return {"prompt_token_ids": choice.prompt.ids} if self._returns_ids else {}

    def choice(self, choice: Choice) -> dict[str, Any]:
        """See `ChunkFormatter.choice`."""
        parts = choice.parts
        calls = {"tool_calls": [call.whole for call in parts.tool_calls]} if parts.tool_calls else {}
        message = {"role": "assistant", "refusal": None, **_texts(parts), **calls}
        if not parts.content:
            message["content"] = None if parts.tool_calls else ""
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.steps),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.tokens} if self._returns_ids else {}),
        }

    def delta(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        """See `ChunkFormatter.delta`."""
        members = _texts(delta.parts)
        if delta.parts.tool_calls:
            members["tool_calls"] = [call.delta for call in delta.parts.tool_calls]
        return {
            "index": choice.index,
            "delta": members,
            "logprobs": self._logprobs([] if delta.step is None else [delta.step]),
            "finish_reason": None,
            **({"token_ids": delta.tokens} if self._returns_ids else {}),
        }

    def _logprobs(self, steps: list[Step]) -> dict[str, Any] | None:
        """Return the logprobs of all tokens of some steps, each with its alternatives."""
        body = self.output.body
        if not (isinstance(body, ChatRequest) and body.logprobs and steps):
            return None
        entry = self.output.serving.token_text.entry
        tokens = [token for step in steps for token in step.logprobs or ()]
        content = [
            {**entry(each.token, each.logprob), "top_logprobs": [entry(*alternative) for alternative in each.top]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}


def _texts(parts: Parts) -> dict[str, Any]:
    """Return the texts of a message or a delta, with reasoning under both names in use."""
    made: dict[str, Any] = {}
    if parts.reasoning:
        made |= {"reasoning_content": parts.reasoning, "reasoning": parts.reasoning}
    if parts.content:
        made["content"] = parts.content
    return made
