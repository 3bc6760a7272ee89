"""Toy models and fakes for tests: of this package, and of programs that use it.

>>> model = toy_model("llama", vocabulary=32)
>>> lade.generate(model, input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=20)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lade.clock import Clock, Duration, WallClock
from lade.decoding.loop import PromptLogitsHook
from lade.decoding.tree import TokenTree
from lade.model.randomness import DrawsFrom
from lade.tuning.step_cost import StepCost


def toy_model(
    family: str = "llama",
    *,
    vocabulary: int = 48,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    attention: str = "sdpa",
    positions: int = 512,
) -> PreTrainedModel:
    """A random model of a few thousand parameters, in evaluation mode, that never emits an end of sequence.

    Its weights are large enough for its greedy text to be neither constant nor soon periodic.

    Args:
        family: `llama` (grouped heads), `qwen3` or `gpt2` (learned positions).
        vocabulary: V.
        seed: seeds the weights; torch's global generator is left as it was.
        dtype: dtype of the weights.
        attention: `sdpa` or `eager`.
        positions: length of the context.

    Raises:
        ValueError: the family is none of these.
    """
    make = _FAMILIES.get(family)
    if make is None:
        raise ValueError(f"family={family!r} is not valid: give one of {', '.join(_FAMILIES)}")
    with DrawsFrom(torch.Generator().manual_seed(seed)):
        model = make(vocabulary, positions)
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.set_attn_implementation(attention)
    torch.nn.Module.to(model, dtype)
    model.eval()
    return model


def _rotary(vocabulary: int, positions: int) -> dict[str, Any]:
    """Sizes of the rotary families."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": positions,
        "initializer_range": 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _llama(vocabulary: int, positions: int) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_rotary(vocabulary, positions)))


def _qwen3(vocabulary: int, positions: int) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_rotary(vocabulary, positions), head_dim=8))


def _gpt2(vocabulary: int, positions: int) -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=positions,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


_FAMILIES: dict[str, Callable[[int, int], PreTrainedModel]] = {"llama": _llama, "qwen3": _qwen3, "gpt2": _gpt2}


def nearly_flat_cost() -> StepCost:
    """A step cost that makes guessing worth while: 128 tokens at once cost twice what one costs."""
    return StepCost.of({1: [1e-3], 128: [2e-3]})


class ListCache:
    """A cache of token ids instead of keys and values: what a row's cache must hold, in plain sight.

    Attributes:
        rows: `[B]` lists of cached ids.
    """

    def __init__(self, batch: int = 1) -> None:
        self.rows: list[list[int]] = [[] for _ in range(batch)]

    @property
    def lengths(self) -> list[int]:
        """`[B]`."""
        return [len(row) for row in self.rows]

    def keep(self, paths: Sequence[Sequence[int]], fed: int) -> None:
        """Of the last `fed` ids of each row keep those of its path."""
        for row, path in zip(self.rows, paths, strict=True):
            start = len(row) - fed
            row[start:] = [row[start + node] for node in path]

    def leave(self, row: int) -> None:
        """Forget a row; the last one takes its place."""
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only these rows."""
        self.rows = [self.rows[i] for i in indices.tolist()]


class FunctionRunner:
    """Runs a function from text to next token instead of a model: text in, the token that follows it out.

    It attends as a model does, to the cache and a node's ancestors, so wrong bookkeeping gives a wrong text.

    Args:
        follow: the token that follows a text.
        vocabulary: V.
        max_length: positions there are; None for no end.
    """

    def __init__(self, follow: Callable[[Sequence[int]], int], vocabulary: int, max_length: int | None = None) -> None:
        self.follow, self.vocabulary, self.max_length = follow, vocabulary, max_length
        self.clock: Clock = WallClock()
        self.pass_time = Duration(0.0, 0.0)
        self.passes = 0

    def room(self, cached: int) -> int | None:
        """Depth left before `max_length`."""
        return None if self.max_length is None else max(0, self.max_length - 1 - cached)

    def prefill(
        self, rows: Sequence[Sequence[int]], cache: ListCache, hook: PromptLogitsHook | None = None
    ) -> torch.Tensor:
        """Logits `[B, V]` after each row; `hook` is called with those of all tokens."""
        cache.rows = [list(row) for row in rows]
        for number, row in enumerate(rows if hook else ()):
            assert hook is not None
            hook([number], 0, torch.stack([self._logits(row[: n + 1]) for n in range(len(row))]))
        return torch.stack([self._logits(row) for row in rows])

    def forward(self, trees: Sequence[TokenTree], rows: Sequence[Sequence[int]], cache: ListCache) -> torch.Tensor:
        """Logits `[B, S, V]`; in rows with a smaller tree zeros follow."""
        self.passes += 1
        size = max(map(len, trees))
        logits = torch.zeros(len(trees), size, self.vocabulary)
        for row, (tree, cached) in enumerate(zip(trees, cache.rows, strict=True)):
            seen = tree.closure()
            for node in range(len(tree)):
                text = cached + [tree.ids[i] for i in range(len(tree)) if seen[node, i]]
                logits[row, node] = self._logits(text)
            cached.extend(tree.ids + [-1] * (size - len(tree)))
        return logits

    def _logits(self, text: Sequence[int]) -> torch.Tensor:
        logits = torch.zeros(self.vocabulary)
        logits[self.follow(text)] = 1.0
        return logits
