"""Encoder-decoder models: their decoders are fed trees, and write what plain decoding writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import CONFIGS, PAPER, Watch
from encoder_decoders import LISTED, USUAL, EncoderDecoder, article

import lade
from lade.model.support.supports import ENCODER_DECODERS
from lade.model.support.tree_check import worst_error

CASES = [pytest.param(case, backend, id=f"{case}-{backend}") for case in LISTED for backend in ("sdpa", "eager")]
MODELS = [pytest.param(case, id=str(case)) for case in LISTED]
BART, T5 = USUAL[:2]


def plain(model: Any, ids: torch.Tensor | None, **arguments: Any) -> Any:
    return model.generate(input_ids=ids, **{"max_new_tokens": 70, "do_sample": False, **arguments})


def lookahead(model: Any, ids: torch.Tensor | None, config: Any = PAPER, **arguments: Any) -> Any:
    return lade.generate(
        model, input_ids=ids, lookahead=config, **{"max_new_tokens": 70, "do_sample": False, **arguments}
    )


def assert_same(model: Any, ids: torch.Tensor | None, configs: Any = (PAPER,), **arguments: Any) -> lade.Stats:
    expected, stats = plain(model, ids, **arguments), lade.Stats()
    for config in configs:
        assert torch.equal(lookahead(model, ids, config, stats=stats, **arguments), expected), config
    return stats


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_it_writes_what_plain_decoding_writes(case: EncoderDecoder, backend: str, watch: Watch) -> None:
    model = case.build(backend)
    assert lade.supports(model)
    expected = plain(model, article(20))
    assert len(set(expected[0].tolist())) > 9, "the text puts nothing to the test"
    assert not torch.equal(expected, plain(model, article(20, seed=1))), "the encoder does nothing"
    stats = assert_same(model, article(20), CONFIGS[:3] if backend == "sdpa" else CONFIGS[:2])
    assert stats.tokens_per_step > 1 and watch.branched and watch.moved
    assert_same(model, article(1, seed=2), [PAPER])


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", MODELS)
def test_all_ways_to_call_it(case: EncoderDecoder) -> None:
    model, ids = case.build(), article(20)
    expected = plain(model, ids)
    arguments = {"max_new_tokens": 70, "do_sample": False, "lookahead": PAPER}
    assert torch.equal(model.generate(input_ids=ids, custom_generate=lade.decode, **arguments), expected)
    assert torch.equal(lade.generate(model, ids, **{**arguments, "lookahead": "auto"}), expected)
    steps = list(lade.stream(model, input_ids=ids, **arguments))
    assert [token for step in steps for token in step.tokens] == expected[0, 1:].tolist()
    assert any(len(step.tokens) > 1 for step in steps)
    lade.enable(model, PAPER)
    assert torch.equal(model.generate(ids, max_new_tokens=70, do_sample=False), expected)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_the_logits_at_every_node_are_those_of_plain_passes(case: EncoderDecoder, backend: str) -> None:
    model = case.build(backend, seed=2)
    assert worst_error(model, lade.supports(model).require(), beyond=20) < 1e-10


def test_every_listed_family_is_tested() -> None:
    assert {case.model_type for case in LISTED} == ENCODER_DECODERS
