"""Helpers of the parity tests: prompts, plain decoding, and the comparison with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import pytest
import torch
from families import VOCABULARY, Family
from torch.nn.functional import pad
from transformers.generation.streamers import BaseStreamer

import lade
from lade.decoding.tree import TokenTree

PAPER = lade.LookaheadConfig(7, 5, 7)
ADAPTIVE = (lade.LookaheadConfig(budget=24), lade.LookaheadConfig())
CONFIGS = (PAPER, *ADAPTIVE, *(lade.LookaheadConfig(*sizes) for sizes in ((3, 2, 4), (0, 4, 5), (5, 3, 0), (1, 4, 1))))


@dataclass
class Watch:
    """What a generation did inside."""

    trees: list[TokenTree] = field(default_factory=list)
    paths: list[Sequence[int]] = field(default_factory=list)
    furthest: int = 0  # the highest position of any node

    @property
    def branched(self) -> bool:
        """Whether some tree had a node with two children."""
        return any(len(set(tree.parents)) < len(tree.parents) for tree in self.trees)

    @property
    def moved(self) -> bool:
        """Whether some accepted keys had to move forward in the cache."""
        return any(list(path) != list(range(len(path))) for path in self.paths)


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    """Random ids `[1, length]`, without the padding id 0."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(1, VOCABULARY, (1, length), generator=generator)


def batch(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded on the left, and their mask."""
    rows = [prompt(length, seed=100 * seed + row) for row, length in enumerate(lengths)]
    ids = torch.cat([pad(row, (max(lengths) - row.shape[1], 0)) for row in rows])
    return {"ids": ids, "attention_mask": (ids != 0).long()}


def build(case: Family, backend: str | None = None, **fields: Any) -> Any:
    """A model that plain decoding can decode with padding.

    An additive mask of float64 becomes infinite in a softmax of float32, so rows of padding become NaN; llama4 counts
    padding where its temperature rises, and indexers where they pick.
    """
    backend = backend or case.backends[0]
    if case.model_type == "llama4_text":
        fields = {"floor_scale": 8192, **fields}
    if "index_topk" in case.extra:
        fields = {"index_topk": 512, **fields}
    dtype = torch.float32 if backend == "eager" else None
    return case.build(backend, dtype=dtype, **fields)


def plain(model: Any, ids: torch.Tensor | None, **arguments: Any) -> Any:
    """What `model.generate` returns; 40 new tokens unless told otherwise."""
    if "max_length" not in arguments:
        arguments.setdefault("max_new_tokens", 40)
    arguments.setdefault("do_sample", False)
    return model.generate(input_ids=ids, **arguments)


class Listener(BaseStreamer):
    """What a streamer is given."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


def lookahead(model: Any, ids: torch.Tensor | None, config: Any = PAPER, **arguments: Any) -> Any:
    """What `lade.generate` returns for the same arguments."""
    if "max_length" not in arguments:
        arguments.setdefault("max_new_tokens", 40)
    arguments.setdefault("do_sample", False)
    return lade.generate(model, input_ids=ids, lookahead=config, **arguments)


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the generator that draws there."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def assert_alike(ours: Any, expected: Any, label: object = "", **tolerance: float) -> None:
    """Assert that tokens are equal, that scores are close, and of beams what they come from and their sums."""
    assert type(ours) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert torch.equal(ours, expected), label
        return
    assert torch.equal(ours.sequences, expected.sequences), label
    of_beams = hasattr(expected, "beam_indices")
    for name in ("sequences_scores", "beam_indices") if of_beams else ("scores", "logits"):
        if getattr(expected, name) is not None:
            torch.testing.assert_close(getattr(ours, name), getattr(expected, name), **tolerance)


def assert_same(
    model: Any,
    ids: torch.Tensor | None,
    configs: Sequence[Any] = (PAPER,),
    seed: int = 3,
    *,
    twin: Any = None,
    tolerance: dict[str, float] | None = None,
    **arguments: Any,
) -> lade.Stats:
    """Assert that every config gives plain's output, greedy or drawn, and leaves the generator as plain does.

    Scores may differ by `tolerance`; `twin`, if given, is what decodes plainly. Returns the figures of all configs.
    """
    torch.manual_seed(seed)
    expected, state, stats = plain(twin or model, ids, **arguments), generator_state(model.device), lade.Stats()
    for config in configs:
        torch.manual_seed(seed)
        assert_alike(lookahead(model, ids, config, stats=stats, **arguments), expected, config, **(tolerance or {}))
        assert torch.equal(generator_state(model.device), state), config
    return stats


def assert_refused(
    model: Any, ids: torch.Tensor | None, match: str, error: type[Exception] = lade.UnsupportedModelError, **more: Any
) -> None:
    """Assert that a config is refused with this reason, and that `auto` decodes plainly and says so, once."""
    with pytest.raises(error, match=match):
        lookahead(model, ids, PAPER, **more)
    with pytest.warns(lade.FallbackWarning, match=match) as caught:
        assert_same(model, ids, ["auto"], **more)
    only_fallback(caught.list)


def assert_same_beams(model: Any, ids: torch.Tensor, config: Any = PAPER, **arguments: Any) -> lade.Stats:
    """Assert it for beams, their scores and what they come from."""
    return assert_same(model, ids, [config], 5, return_dict_in_generate=True, output_scores=True, **arguments)


def assert_near_ties(model: Any, ids: torch.Tensor, configs: Sequence[Any]) -> None:
    """Assert that all tokens score as plain passes over the text would have it, up to a few units in the last place."""
    with pytest.warns(lade.PrecisionWarning, match="where two tokens score almost equally"):  # once
        texts = [lookahead(model, ids, config) for config in configs]
    for text, config in zip(texts, configs, strict=True):
        with torch.no_grad():
            scores = model(text).logits[0, ids.shape[1] - 1 : -1].float()
        lost = scores.max(dim=-1).values - scores.gather(1, text[0, ids.shape[1] :, None])[:, 0]
        assert (lost <= scores.abs().max() / 32).all(), config  # a few units in the last place of eight bits


def assert_requests(model: Any, asked: Sequence[dict[str, Any]], **engine: Any) -> list[Any]:
    """Assert that an engine writes what plain decoding does for each request; returns its handles.

    Requests are greedy and by the paper's method unless they say otherwise.
    """
    asked, expected = [{"do_sample": False, **each} for each in asked], []
    for seed, each in enumerate(asked):
        torch.manual_seed(seed)
        expected.append(model.generate(**{name: value for name, value in each.items() if name != "lookahead"}))
    with lade.Engine(model, **engine) as served:  # from here on the model is the engine's
        handles = [served.add(**{"lookahead": PAPER, "seed": seed, **each}) for seed, each in enumerate(asked)]
        for number, (handle, ids) in enumerate(zip(handles, expected, strict=True)):
            assert torch.equal(handle.result(120.0), ids), number
    return handles


def in_turn(things: Sequence[Any], *case: object, count: int = 1) -> list[Any]:
    """A few of them, others for another case: each case is quick, and over all cases each thing is tried often."""
    first = crc32(" ".join(map(str, case)).encode())
    return [things[(first + number) % len(things)] for number in range(count)]


def only_fallback(caught: Sequence[warnings.WarningMessage]) -> str:
    """Assert that exactly one warning was given, a `FallbackWarning`; returns its text."""
    assert [warning.category for warning in caught] == [lade.FallbackWarning], [str(w.message) for w in caught]
    return str(caught[0].message)


def streamed(model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """A prompt and what a stream goes on with."""
    tokens = [token for step in lade.stream(model, input_ids=input_ids, **arguments) for token in step.tokens]
    return torch.cat([input_ids, torch.tensor([tokens], dtype=torch.long)], dim=1)


def served(model: Any, **arguments: Any) -> torch.Tensor:
    """The text of an engine's only request."""
    with lade.Engine(model) as engine:
        output: torch.Tensor = engine.add(**arguments).result(60.0)
    return output


def enabled(model: Any, lookahead: Any = "auto", **arguments: Any) -> torch.Tensor:
    """What a model's own `generate` returns while lookahead decoding is enabled."""
    try:
        return lade.enable(model, lookahead).generate(**arguments)  # type: ignore[no-any-return]
    finally:
        lade.disable(model)


def custom(model: Any, **arguments: Any) -> Any:
    """What its own `generate` returns that is told to decode so."""
    return model.generate(custom_generate=lade.decode, **arguments)


DOORS: dict[str, Callable[..., Any]] = {
    "generate": lade.generate,
    "custom": custom,
    "enable": enabled,
    "stream": streamed,
    "engine": served,
}
"""All take a model, `input_ids`, `lookahead` and other arguments of `generate`, and return the whole text."""
