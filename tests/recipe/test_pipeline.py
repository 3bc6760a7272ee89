"""transformers' text-generation pipeline."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from accelerating import RECIPE, Way, accelerated
from transformers import Pipeline, TextIteratorStreamer, pipeline

import lade
from lade.embedded.files import prompts

GREEDY = {"do_sample": False, "max_new_tokens": 40}


@pytest.fixture
def pipe(model: Any, tokenizer: Any) -> Pipeline:
    return pipeline("text-generation", model=model, tokenizer=tokenizer)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "arguments",
    [GREEDY, {"do_sample": True, "max_new_tokens": 60}],
    ids=["greedy", "sampled"],
)
def test_a_prompt(pipe: Pipeline, way: Way, text: str, arguments: dict[str, Any]) -> None:
    def run(**further: Any) -> Any:
        torch.manual_seed(5)
        return pipe(text, return_tensors=True, **arguments, **further)

    accelerated(way, pipe.model, run)


@pytest.mark.slow
def test_a_batch(pipe: Pipeline, way: Way) -> None:
    accelerated(way, pipe.model, functools.partial(pipe, prompts()[:2], batch_size=2, **GREEDY))


def test_a_sequence_that_stops(pipe: Pipeline, way: Way, text: str) -> None:
    run = functools.partial(pipe, text, stop_sequence="def", return_full_text=False, **GREEDY)
    assert accelerated(way, pipe.model, run)[0]["generated_text"].endswith("def")


@pytest.mark.one_in(2)
def test_a_streamer(pipe: Pipeline, way: Way, text: str) -> None:
    def run(**further: Any) -> str:
        streamer = TextIteratorStreamer(pipe.tokenizer, skip_prompt=True, timeout=60)
        thread = threading.Thread(target=pipe, args=(text,), kwargs={**GREEDY, **further, "streamer": streamer})
        thread.start()
        streamed = "".join(streamer)
        thread.join()
        return streamed

    accelerated(way, pipe.model, run)


def test_the_pipelines_own_trust_does_not_reach_generate(model: Any, tokenizer: Any, text: str) -> None:
    """So docs/frameworks.md says to give both arguments with the call."""
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, **{**RECIPE, "trust_remote_code": False})
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        pipe(text, trust_remote_code=False, **GREEDY)
    stats = lade.Stats()
    pipe(text, trust_remote_code=True, stats=stats, lookahead="budget=16", **GREEDY)
    assert stats.generations == 1 and stats.tokens_per_step > 1
