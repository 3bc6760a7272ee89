"""What holds on the CPU holds on a GPU. Each test runs on both: marked `gpu` where it needs one, small where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import PAPER, generator_state, lookahead, plain, prompt
from families import family
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer

import lade
from lade.embedded import model_path
from lade_lab import Settings, inflate, workloads

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
FAMILIES = ["llama", "mistral-window", "qwen3", "gemma3_text", "gpt2", "mixtral", "deepseek_v3", "bloom"]
CONFIGS = {"paper": PAPER, "budget": lade.LookaheadConfig(budget=24), "adaptive": lade.LookaheadConfig()}
EACH_CONFIG = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def built(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = family(name).build(dtype=dtype)
    return model.to(device)


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_plain_decodings(name, device):
    model, ids, stats = built(name, device), prompt(20).to(device), lade.Stats()
    expected = plain(model, ids)
    for config in CONFIGS.values():
        ours = lookahead(model, ids, config, stats=stats)
        assert ours.device == expected.device and torch.equal(ours, expected), config
    assert stats.tokens_per_step > 1, "no guess was ever accepted"


@pytest.mark.one_in(6)
@EACH_CONFIG
def test_samples_and_the_generator_afterwards_are_plain_decodings(config, device):
    model, ids = built("llama", device), prompt(20).to(device)
    seen = []
    for seed in (0, 1):
        ends = []
        for way in (plain, lambda *given, **named: lookahead(*given, config, **named)):
            torch.manual_seed(seed)
            output = way(model, ids, do_sample=True, temperature=0.7, top_k=20, top_p=0.95)
            ends.append((output, generator_state(device)))
        (expected, state), (ours, our_state) = ends
        assert torch.equal(ours, expected) and torch.equal(our_state, state), seed
        seen.append(expected)
    assert not torch.equal(*seen), "both seeds gave one text: nothing was drawn"


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_beams_are_plain_decodings(sampled, device):
    model, ids = built("llama", device), prompt(20).to(device)
    arguments = {"num_beams": 3, "num_return_sequences": 3, "do_sample": sampled, "max_new_tokens": 40}
    arguments |= {"return_dict_in_generate": True, "output_scores": True}
    stats, outputs = lade.Stats(), []
    for way in (plain, lambda *given, **named: lookahead(*given, stats=stats, **named)):
        torch.manual_seed(0)
        outputs.append((way(model, ids, **arguments), generator_state(device)))
    (expected, state), (ours, our_state) = outputs
    assert torch.equal(ours.sequences, expected.sequences) and torch.equal(our_state, state)
    assert torch.equal(ours.beam_indices, expected.beam_indices)
    torch.testing.assert_close(ours.sequences_scores, expected.sequences_scores)
    assert stats.steps < 40, "no guess was ever accepted"


def test_a_stream_yields_the_same_tokens(device):
    model, ids = built("qwen3", device), prompt(20).to(device)
    expected = plain(model, ids)[0].tolist()
    steps = list(lade.stream(model, input_ids=ids, max_new_tokens=40, do_sample=False))
    assert [token for step in steps for token in step.tokens] == expected[20:] and len(steps) < 40

    class Listener(BaseStreamer):
        heard: list[int] = []  # noqa: RUF012

        def put(self, value: torch.Tensor) -> None:
            assert value.device.type == "cpu"
            self.heard += value.flatten().tolist()

        def end(self) -> None:
            self.heard.append(-1)

    lookahead(model, ids, streamer=Listener())
    assert Listener.heard == [*expected, -1]


def test_low_precision_decodes_as_plain_passes_do_but_for_near_ties(device):
    model, ids = built("llama", device, torch.bfloat16), prompt(20).to(device)
    with pytest.warns(lade.PrecisionWarning, match="where two tokens score almost equally"):  # once
        texts = [lookahead(model, ids, config) for config in CONFIGS.values()]
    for text, config in zip(texts, CONFIGS.values(), strict=True):
        with torch.no_grad():
            scores = model(text).logits[0, 19:-1].float()
        lost = scores.max(dim=-1).values - scores.gather(1, text[0, 20:, None])[:, 0]
        assert (lost <= scores.abs().max() / 32).all(), config  # a few units in the last place of eight bits


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
