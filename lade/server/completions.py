"""`/v1/completions`: continuations of plain text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from lade.grammar import Grammar
from lade.server.answer import ChunkFormatter, Preprocessor
from lade.server.choice import Choice, ChoiceDelta, EncodedPrompt, RequestOutput
from lade.server.errors import invalid
from lade.server.output_parser import PlainParser
from lade.server.schemas import CompletionRequest
from lade.server.served_model import ServedModel, TextOffsets, TokenText, finite
from lade.server.service import Serving
from lade.server.settings import MAX_ECHOED
from lade.server.structured_output import requested_grammar
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
        if _echoes_logprobs(body) and tokens * body.n * (top + 1) > MAX_ECHOED:
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

    def parser(self, prompt: EncodedPrompt, serving: Serving) -> PlainParser:
        """See `Preprocessor.parser`."""
        return PlainParser()

    def grammar(self, prompt: EncodedPrompt, serving: Serving) -> tuple[Grammar, str] | None:
        """See `Preprocessor.grammar`."""
        return requested_grammar(self.body)

    def arguments(self) -> dict[str, Any]:
        """See `Preprocessor.arguments`."""
        return {"prompt_logprobs": self.body.logprobs} if _echoes_logprobs(self.body) else {}


class CompletionFormatter(ChunkFormatter):
    """Text completions: `text_completion` objects and chunks."""

    endpoint = "completions"
    id_prefix, kind, chunk_kind = "cmpl-", "text_completion", "text_completion"
    prompt_field = "prompt"

    def __init__(self, output: RequestOutput) -> None:
        super().__init__(output)
        assert isinstance(output.body, CompletionRequest)  # the route's schema
        self._body = output.body
        self._logprobs = defaultdict[int, CompletionLogprobs](lambda: CompletionLogprobs(output.serving.token_text))

    def first(self) -> Iterator[bytes]:
        """See `Formatter.first`: the echoed prompts; with logprobs they come with the first step instead."""
        body = self._body
        for choice in self.output.choices:
            echo = choice.prompt.text if body.echo and not _echoes_logprobs(body) else ""
            if echo or body.return_token_ids:
                ids = {"prompt_token_ids": choice.prompt.ids} if body.return_token_ids else {}
                yield self.chunk({"index": choice.index, "text": echo, "logprobs": None, "finish_reason": None, **ids})

    def choice(self, choice: Choice) -> dict[str, Any]:
        """See `ChunkFormatter.choice`."""
        body = self._body
        echo = choice.prompt.text if body.echo else ""
        ids = {"prompt_token_ids": choice.prompt.ids, "token_ids": choice.tokens} if body.return_token_ids else {}
        return {
            "index": choice.index,
            "text": echo + choice.parts.content,
            "logprobs": self._formatted_logprobs(choice, choice.steps, first=True),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **ids,
        }

    def delta(self, choice: Choice, delta: ChoiceDelta) -> dict[str, Any]:
        """See `ChunkFormatter.delta`."""
        first = delta is choice.deltas[0]
        echo = choice.prompt.text if first and _echoes_logprobs(self._body) else ""
        steps = [] if delta.step is None else [delta.step]
        return {
            "index": choice.index,
            "text": echo + delta.parts.content,
            "logprobs": self._formatted_logprobs(choice, steps, first=first) if steps else None,
            "finish_reason": None,
            **({"token_ids": delta.tokens} if self._body.return_token_ids else {}),
        }

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


def _echoes_logprobs(body: CompletionRequest) -> bool:
    """Return True if the logprobs of prompts are echoed."""
    return body.echo and body.logprobs is not None


LogprobLists = dict[str, list[Any]]
"""Logprobs of `/v1/completions`: lists of equal length."""


class CompletionLogprobs:
    """Incremental logprobs of one choice, whose text offsets depend on the tokens before."""

    def __init__(self, token_text: TokenText) -> None:
        self._token_text, self._offsets = token_text, TextOffsets(token_text)

    def of_prompt(self, first: int, text: str, others: Sequence[TokenLogprobs]) -> LogprobLists:
        """Return the logprobs of a prompt, null for its first token.

        Args:
            first: id of the first token.
            text: the prompt as shown; tokenizers may put a space before it.
            others: logprobs of the other tokens.
        """
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
