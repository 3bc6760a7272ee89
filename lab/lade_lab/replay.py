"""Replay of given texts: the recorded answer takes the place of the model's choices, so tokens per step can be counted.

    prompt ............ | answer ........     given
    prefill             | draft, verify, draft, verify, ...

All methods write the same answer, through the library's own loop. Methods that do not read logits need no model:
`replay` runs them on the recorded text alone. The library's method learns from the logits of a model, rejected nodes
included: `recorded` lets a real model run, and raises the recorded token above what it would have chosen. Counts do not
depend on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import lade
from lade import LookaheadConfig
from lade.clock import Clock, Duration, WallClock
from lade.decoding.drafting.controller import LARGEST
from lade.decoding.drafting.drafter import Drafter
from lade.decoding.drafting.user_sources import LoneSources, SourcedDrafter, sources_of
from lade.decoding.loop import DecodeLoop, PromptLogitsHook
from lade.decoding.row import Row
from lade.decoding.tree import ROOT, TokenTree
from lade.decoding.verify import Greedy
from lade_lab.fakes import ListCache

WINDOW = 512
"""Tokens that each token of `windowed` attends to."""


class RecordedRunner:
    """A runner that follows a given text, with one-hot logits: a `Runner` on a `ListCache`."""

    def __init__(self, text: Sequence[int], vocabulary: int) -> None:
        self._text, self._vocabulary = list(text), vocabulary
        self.clock: Clock = WallClock()
        self.pass_time = Duration(0.0, 0.0)
        self.prepared = False

    def room(self, cached: int) -> None:
        """See `Runner`: no limit."""

    def prefill(
        self, rows: Sequence[Sequence[int]], cache: ListCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """See `Runner`; the prompt is a beginning of the text."""
        assert hook is None, "methods that learn from logits need a model: use recorded"
        cache.rows = [list(row) for row in rows]
        return self._one_hot([self._text[len(row)] for row in rows])

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: ListCache) -> torch.Tensor:
        """See `Runner`."""
        (tree,), (cached,) = trees, cache.rows
        start, chosen, numbers = len(cached), list[int](), list[int | None]()  # index in the text; None off it
        for token, parent in zip(tree.ids, tree.parents, strict=True):
            above = start - 1 if parent < ROOT else numbers[parent]
            number = None if above is None or self._at(above + 1) != token else above + 1
            numbers.append(number)
            following = None if number is None else self._at(number + 1)
            chosen.append(0 if following is None else following)
        cached.extend(tree.ids)
        return self._one_hot(chosen)[None]

    def _at(self, number: int) -> int | None:
        return self._text[number] if number < len(self._text) else None

    def _one_hot(self, tokens: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(len(tokens), self._vocabulary)
        logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 1.0
        return logits


def alone(drafter: lade.Drafter, vocabulary: int) -> Drafter:
    """Return the drafter of one row that feeds what another one proposes, of an id below `vocabulary`."""
    own = sources_of(LookaheadConfig(sources=[drafter], only=True), vocabulary, (), LARGEST, apart=None)
    return SourcedDrafter(LoneSources(own, LARGEST), own)


def replay(prompt: Sequence[int], answer: Sequence[int], drafter: lade.Drafter, vocabulary: int) -> lade.Stats:
    """Return the figures of decoding a recorded answer by a method that does not read logits.

    Raises:
        AssertionError: the method wrote another text.
    """
    text = [*prompt, *answer]
    row = Row(prompt, alone(drafter, vocabulary), Greedy(), lambda tokens: len(tokens) >= len(text))
    stats = lade.Stats()
    for _ in DecodeLoop([row], RecordedRunner(text, vocabulary), ListCache(), stats).run():
        pass
    assert row.tokens == text, "the recorded text is not what was decoded"
    return stats


@contextmanager
def recorded(model: Any, text: Sequence[int], start: int = 0) -> Iterator[None]:
    """Within this context greedy decoding by a model follows a text: the next token's logit is raised above all others.

    At each node that carries the text's token at its position the model's logits are kept otherwise.

    Args:
        model: a causal language model; one row is decoded at a time.
        text: ids of prompt and answer.
        start: number of tokens whose logits stay the model's own, which saves time where time is measured.
    """
    following = torch.tensor([*text[1:], -1])

    def raise_next(module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        logits, ids, places = output.logits, kwargs.get("input_ids"), kwargs.get("position_ids")
        if ids is None or places is None:
            return
        fed = logits.shape[1]
        own, at = ids[0, -fed:], places[0, -fed:].clamp(max=len(text) - 1)
        on_text = (torch.tensor(text)[at] == own) & (following[at] >= 0) & (at >= start)
        rows = on_text.nonzero()[:, 0]
        logits[0, rows, following[at[rows]]] = logits[0, rows].amax(-1) + 1.0

    handle = model.register_forward_hook(raise_next, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def read_model(path: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Return a model whose passes all round alike, and its tokenizer.

    Args:
        path: folder or hub id, read in `dtype`; or a GGUF file, whose weights stay as they are.
        dtype: float32 or float64.
    """
    if path.endswith(".gguf"):
        model, tokenizer = lade.load_gguf(path)
        lade.invariant(model)
    else:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype=dtype), AutoTokenizer.from_pretrained(path)
    return model.eval().requires_grad_(False), tokenizer


def without_end(path: str, longest: int) -> Any:
    """Return the model of `read_model`, which never ends a text; windowed if its context is shorter than `longest`."""
    model, _ = read_model(path)
    if model.config.max_position_embeddings < longest:
        model = windowed(model)
    model.generation_config.eos_token_id = None
    return model


def windowed(llama: Any) -> Any:
    """Return a Llama model of which each token sees the last `WINDOW` ones only, so that texts may be long."""
    assert isinstance(llama, LlamaForCausalLM), "only Llama has the layers of Mistral"
    values = {**llama.config.to_dict(), "sliding_window": WINDOW, "max_position_embeddings": 2**17}
    for name in ("model_type", "architectures", "mlp_bias", "attention_bias", "pretraining_tp"):
        values.pop(name, None)
    model = MistralForCausalLM(MistralConfig(**values))
    model.load_state_dict(llama.state_dict())
    return model.eval().requires_grad_(False)


def table(columns: Sequence[str], rows: Sequence[Mapping[str, object]]) -> str:
    """Return a table in Markdown; numbers with two decimals, empty where a row lacks a column."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        lines.append(f"| {' | '.join(f'{cell:.2f}' if isinstance(cell, float) else str(cell) for cell in cells)} |")
    return "\n".join(lines)
