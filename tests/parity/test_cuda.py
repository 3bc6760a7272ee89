"""What holds on the CPU holds on a GPU. Each test runs on both: marked `gpu` where it needs one, small where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import PAPER, Listener, assert_near_ties, lookahead, plain, prompt
from families import family
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.embedded import model_path
from lade_lab import Settings, inflate, workloads


def built(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = family(name).build(dtype=dtype)
    return model.to(device)


def test_a_stream_yields_the_same_tokens(device):
    model, ids = built("qwen3", device), prompt(20).to(device)
    ours, theirs = Listener(), Listener()
    expected = plain(model, ids, streamer=theirs)[0, 20:].tolist()
    steps = list(lade.stream(model, input_ids=ids, max_new_tokens=40, do_sample=False))
    assert [token for step in steps for token in step.tokens] == expected and len(steps) < 40
    lookahead(model, ids, streamer=ours)
    assert ours.heard == theirs.heard and len(ours.heard) > 40


def test_low_precision_decodes_as_plain_passes_do_but_for_near_ties(device):
    model = built("llama", device, torch.bfloat16)
    assert_near_ties(model, prompt(20).to(device), (PAPER, lade.LookaheadConfig(budget=24), lade.LookaheadConfig()))


def test_an_inflated_model_is_made_on_its_device_and_writes_the_same(device):
    small = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    ids = tokenizer("def mean(values):\n", return_tensors="pt").input_ids.to(device)
    large = inflate(small, 20e6)
    assert {weight.device.type for weight in [*large.parameters(), *large.buffers()]} == {device.type}
    assert torch.equal(plain(large, ids, max_new_tokens=24), plain(small, ids, max_new_tokens=24))


@pytest.mark.slow
def test_a_benchmark_of_all_methods_runs(device):
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    results = lade.bench.run(
        model, tokenizer, [workloads.load("builtin", limit=2)], settings=Settings(max_new_tokens=12)
    )
    assert results.complete and not results.mismatches and len(results.samples) == 2 * len(results.methods)
    assert results.step_curves and all(sample.decode_s > 0 for sample in results.samples)
