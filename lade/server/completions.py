"""`/v1/completions` and `/v1/chat/completions`: preprocessing of their requests, and their formats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from lade.grammar import Grammar
from lade.server.answer import ChunkFormatter, Preprocessor
from lade.server.choice import Choice, ChoiceDelta, EncodedPrompt, RequestOutput
from lade.server.errors import invalid, unsupported
from lade.server.output_parser import MarkupParser, Parts, PlainParser
from lade.server.sampling_parameters import with_generation_config
from lade.server.schemas import ChatRequest, CompletionRequest
from lade.server.served_model import ServedModel, TextOffsets, TokenText, finite
from lade.server.service import Serving
from lade.server.settings import MAX_ECHOED
from lade.server.structured_output import RESPONSE_FORMAT, message_grammar, requested_calls, requested_grammar
from lade.stats import Step, TokenLogprobs


class CompletionPreprocessor(Preprocessor):
    """Encodes one or several texts."""

    body: CompletionRequest

    def __init__(self, body: CompletionRequest) -> None:
        self.body = body
        prompt: Any = body.prompt
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        self._given: list[str] | list[list[int]] = prompt if several else [prompt]
        self.prompt_count = len(self._given)
        self.top_logprobs = body.logprobs
        self.prompt_logprobs = body.logprobs if body.echo else None

    def prompts(self, serving: Serving) -> Iterator[EncodedPrompt]:
        """See `Preprocessor.prompts`."""
        body = self.body
        if body.max_tokens == 0 and not body.echo:
            raise invalid("max_tokens", "0 needs echo: give at least 1")
        tokens = 0
        for given in self._given:
            prompt = self._prompt(given, serving.model)
            tokens += len(prompt.ids)
            yield prompt
        top = body.logprobs or 0
        if self.prompt_logprobs is not None and tokens * body.n * (top + 1) > MAX_ECHOED:
            why = f"{tokens} tokens with logprobs={top} and n={body.n} are too many to echo in one request"
            raise invalid("prompt", f"{why}: send fewer prompts, or request fewer logprobs")

    def _prompt(self, given: str | list[int], model: ServedModel) -> EncodedPrompt:
        tokenizer = model.tokenizer
        if isinstance(given, list):
            text = tokenizer.decode(given, skip_special_tokens=True) if self.body.echo else ""
            return EncodedPrompt(given, text=text)
        ids = model.ids(given)
        if not ids and tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id]
        return EncodedPrompt(ids, text=given)


class CompletionFormatter(ChunkFormatter):
    """Text completions: `text_completion` objects and chunks."""

    endpoint = "completions"
    id_prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    prompt_field = "prompt"

    def __init__(self, output: RequestOutput) -> None:
        super().__init__(output)
        assert isinstance(output.body, CompletionRequest)  # the route's schema
        self._body = output.body
        self._echoes_logprobs = output.body.echo and output.body.logprobs is not None
        self._logprobs = defaultdict[int, CompletionLogprobs](lambda: CompletionLogprobs(output.serving.token_text))

    def first(self) -> Iterator[bytes]:
        """See `Formatter.first`: the echoed prompts; with logprobs they come with the first step instead."""
        body = self._body
        for choice in self.output.choices:
            echo = choice.prompt.text if body.echo and not self._echoes_logprobs else ""
            if echo or body.return_token_ids:
                head = {"index": choice.index, "text": echo, "logprobs": None, "finish_reason": None}
                yield self.chunk({**head, **self.prompt_ids(choice)})

    def message(self, choice: Choice) -> dict[str, Any]:
        """See `ChunkFormatter.message`."""
        echo = choice.prompt.text if self._body.echo else ""
        logprobs = self._formatted_logprobs(choice, choice.steps, first=True)
        return {"text": echo + choice.parts.content, "logprobs": logprobs, **self.prompt_ids(choice)}

    def increment(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        """See `ChunkFormatter.increment`."""
        first = delta is choice.deltas[0]
        echo = choice.prompt.text if first and self._echoes_logprobs else ""
        logprobs = None if delta.step is None else self._formatted_logprobs(choice, [delta.step], first=first)
        return {"text": echo + delta.parts.content, "logprobs": logprobs}

    def _formatted_logprobs(self, choice: Choice, steps: Sequence[Step], *, first: bool) -> LogprobLists | None:
        """Return the logprobs of the next steps; those of an echoed prompt precede the first step's."""
        if self._body.logprobs is None:
            return None
        logprobs, echoed = self._logprobs[choice.index], LogprobLists()
        if first and self._body.echo:
            others = [each for each in choice.handle.prompt_logprobs or () if each is not None]
            echoed = logprobs.of_prompt(choice.prompt.ids[0], choice.prompt.text, others)
        own = logprobs.of([token for step in steps for token in step.logprobs or ()])
        return {name: [*echoed.get(name, ()), *values] for name, values in own.items()}


LogprobLists = dict[str, list[Any]]  # logprobs of `/v1/completions`: lists of equal length


class CompletionLogprobs:
    """Incremental logprobs of one choice, whose text offsets depend on the tokens before."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text, self._offsets = token_text, TextOffsets(token_text)

    def of_prompt(self, first: int, text: str, others: Sequence[TokenLogprobs]) -> LogprobLists:
        """Return the logprobs of a prompt, null for its first token; tokenizers may put a space before its text."""
        lists = self.of([TokenLogprobs(first, 0.0, []), *others])
        lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        hidden = max(0, self._offsets.end - len(text))
        self._offsets.end -= hidden
        lists["text_offset"] = [max(0, offset - hidden) for offset in lists["text_offset"]]
        return lists

    def of(self, tokens: Sequence[TokenLogprobs]) -> LogprobLists:
        """Return the logprobs of the next tokens."""
        return {
            "tokens": [self._token_text.text(each.token) for each in tokens],
            "token_logprobs": [finite(each.logprob) for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": self._offsets.take(each.token for each in tokens),
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        """Return the alternatives and the token itself; of several with the same text the likeliest."""
        made: dict[str, float] = {}
        for each, value in (*token.top, (token.token, token.logprob)):
            made.setdefault(self._token_text.text(each), finite(value))
        return made


class ChatPreprocessor(Preprocessor):
    """Renders a conversation by the chat template; one prompt."""

    body: ChatRequest
    parses_markup = True

    def __init__(self, body: ChatRequest, format_field: str = RESPONSE_FORMAT) -> None:
        self._format_field = format_field
        self.body = with_generation_config(body)
        self.top_logprobs = (body.top_logprobs or 0) if body.logprobs else None

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
        form, param = requested_grammar(body, self._format_field) or (None, "tool_choice")
        if form is None and body.tool_choice in (None, "auto", "none"):
            continues = body.ignore_eos or body.min_tokens
            if not body.tools or continues or not grammars.available or markup.has_other_reasoning:
                return None
        elif markup.has_other_reasoning:
            raise unsupported(param, "grammars do not support this model's reasoning markup: leave it out")
        compiler = grammars.compiler(param)
        if form is not None:
            grammars.processor(form, param)  # alone first, so that an error names the format, not the whole message
        calls = requested_calls(body, compiler)
        made = message_grammar(serving.model.chat_template, prompt.text, form, calls, compiler)
        return None if made is None else (made, param)


class ChatFormatter(ChunkFormatter):
    """Chat completions: `chat.completion` objects and chunks."""

    endpoint = "chat"
    id_prefix, kind, chunk_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self) -> dict[str, Any]:
        """See `Formatter.whole`."""
        return {**super().whole(), **self.prompt_ids(self.output.choices[0])}  # beside the choices, as vLLM has them

    def first(self) -> Iterator[bytes]:
        """See `Formatter.first`; the chunk of a choice that has its role."""
        for choice in self.output.choices:
            delta = {"role": "assistant", "content": ""}
            first = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            yield self.chunk(first, **self.prompt_ids(choice))

    def message(self, choice: Choice) -> dict[str, Any]:
        """See `ChunkFormatter.message`."""
        parts = choice.parts
        calls = {"tool_calls": [call.whole for call in parts.tool_calls]} if parts.tool_calls else {}
        message = {"role": "assistant", "refusal": None, **_texts(parts), **calls}
        if not parts.content:
            message["content"] = None if parts.tool_calls else ""
        return {"message": message, "logprobs": self._logprobs(choice.steps)}

    def increment(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        """See `ChunkFormatter.increment`."""
        members = _texts(delta.parts)
        if delta.parts.tool_calls:
            members["tool_calls"] = [call.delta for call in delta.parts.tool_calls]
        return {"delta": members, "logprobs": self._logprobs([] if delta.step is None else [delta.step])}

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
