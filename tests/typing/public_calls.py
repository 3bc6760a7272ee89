"""What type checkers know of the public names: checked by mypy with the package, never run.

An `ignore` that is not needed is an error there, so each one says that its line is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, assert_type

import torch
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateOutput

import lade


def what_generate_returns(model: PreTrainedModel, ids: torch.Tensor, wanted: bool) -> None:
    assert_type(lade.generate(model, ids, return_dict_in_generate=True, output_scores=True), GenerateOutput)
    assert_type(lade.generate(model, input_ids=ids, return_dict_in_generate=False), torch.Tensor)
    assert_type(lade.generate(model, ids, max_new_tokens=5), torch.Tensor | GenerateOutput)
    assert_type(lade.generate(model, ids, return_dict_in_generate=wanted), torch.Tensor | GenerateOutput)
    assert_type(lade.decoder(), Callable[..., torch.Tensor | GenerateOutput])


def what_lookahead_may_be(model: PreTrainedModel, ids: torch.Tensor, name: str) -> None:
    config = lade.LookaheadConfig(memory=lade.Memory())
    lade.generate(model, ids, lookahead=config)
    lade.generate(model, ids, lookahead="auto")
    lade.generate(model, ids, lookahead=None)
    lade.generate(model, ids, lookahead="fast")  # type: ignore[call-overload]
    lade.generate(model, ids, lookahead=name)  # type: ignore[call-overload]
    lade.stream(model, ids, lookahead=name)  # type: ignore[arg-type]
    lade.enable(model, name)  # type: ignore[arg-type]
    lade.Engine(model).add(ids, lookahead=name)  # type: ignore[arg-type]


def what_a_grammar_may_be(model: PreTrainedModel, ids: torch.Tensor) -> None:
    grammar = lade.Grammar.choice(["yes", "no"])
    lade.generate(model, ids, grammar=grammar)
    lade.generate(model, ids, grammar=[grammar, lade.Grammar.json_schema({"type": "boolean"})])
    lade.generate(model, ids, grammar="yes|no")  # type: ignore[arg-type]
    lade.Engine(model).add(ids, grammar=[grammar])  # type: ignore[arg-type]


def what_the_others_return(model: PreTrainedModel, ids: torch.Tensor) -> None:
    assert_type(lade.enable(model, stats=lade.Stats()), PreTrainedModel)
    assert_type(lade.disable(model), PreTrainedModel)
    assert_type(lade.stream(model, ids), Iterator[lade.Step])
    assert_type(lade.supports(model), lade.Support)
    assert_type(lade.Stats().acceptance_rate, float)
    assert_type(lade.Stats().fallback, str | None)
    assert_type(lade.Stats().histogram, dict[tuple[int, int], int])


def what_is_public(error: lade.UnsupportedError) -> Any:
    assert_type(error.reason, str)
    return lade.no_such_name  # type: ignore[attr-defined]
