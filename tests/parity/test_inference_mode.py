"""Passes in inference mode: who makes them, the same numbers, and nothing of them left with anybody else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from encoder_decoders import OTHERS, USUAL
from families import DYNAMIC, RECURRENT_FAMILIES, family, longrope, randomize
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import lade
from lade.backends.tree_attention.backend import NAME as TREE_ATTENTION
from lade.decoding.tree import TokenTree
from lade.model import capture_blockers
from lade.model.capture_blockers import inference_mode_blocker, ordinary
from lade.model.facts import ModelFacts
from lade.model.inputs import INVARIANT_ATTENTION
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.serving.engine import Engine
from lade.testing import toy_model

IDS = torch.tensor([[1, 2, 3, 4, 5, 1, 2, 3]])
FAMILIES = ("llama", "gpt2", "gemma3_text", "qwen3_moe", "falcon", "phi3")


def held_by(value: Any, met: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All tensors that can be reached from an object."""
    met = set() if met is None else met
    if id(value) in met:
        return
    met.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    parts = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else []
    for part in (*parts, *getattr(value, "__dict__", {}).values()):
        yield from held_by(part, met)


def note_modes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether inference mode was on, for each time that our cache was given keys of a pass's first layer."""
    modes, first, update = list[bool](), list[int](), TreeCache.update

    def noting(self: TreeCache, keys: torch.Tensor, values: torch.Tensor, layer: int, *given: Any, **named: Any) -> Any:
        first.append(layer)
        if layer == first[0]:
            modes.append(torch.is_inference_mode_enabled())
        return update(self, keys, values, layer, *given, **named)

    monkeypatch.setattr(TreeCache, "update", noting)
    return modes


@pytest.mark.parametrize("name", FAMILIES)
def test_nothing_of_a_pass_is_left(name, monkeypatch):
    model: Any = family(name).build()
    cache, modes = TreeCache(), note_modes(monkeypatch)
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "past_key_values": cache}
    output = lade.generate(model, IDS, max_new_tokens=40, do_sample=False, **wanted)
    held = [*held_by(output), *held_by(cache), *held_by([vars(module) for module in model.modules()])]
    assert len(held) > 80 and not any(tensor.is_inference() for tensor in held)
    assert sum(modes) > 2, "or else this shows nothing"


def test_the_numbers_are_those_of_other_passes(monkeypatch):
    model = toy_model()

    def written() -> Any:
        wanted = {"return_dict_in_generate": True, "output_logits": True}
        return lade.generate(model, IDS, max_new_tokens=60, do_sample=False, **wanted)

    unrecorded = written()
    monkeypatch.setattr(capture_blockers, "inference_mode_blocker", lambda survey: "to compare them")
    recorded = written()
    assert torch.equal(unrecorded.sequences, recorded.sequences)
    assert torch.equal(torch.stack(unrecorded.logits), torch.stack(recorded.logits))


def test_a_cache_that_grows_in_a_pass_can_be_written_to(monkeypatch):
    monkeypatch.setattr("lade.model.cache_layers.SPARE_TOKENS", 4)
    model, text = toy_model(), IDS[0].tolist()
    runner = EagerRunner(model, lade.supports(model).require(), model.generation_config)
    cache, modes = runner.tree_cache(), note_modes(monkeypatch)
    runner.prefill([text], cache)
    slots = cache.room[1]
    for _ in range(slots):
        runner.forward([TokenTree(3)], [[*text, 3]], cache)
        cache.keep([[0]], 1)
    assert cache.room[1] > slots and modes == [False] + [True] * slots, "the prompt is fed by transformers"
    for layer in cache.attending:
        assert layer.keys is not None and layer.values is not None
        layer.keys.zero_()
        layer.values.zero_()


def test_processors_may_write_into_scores():
    class NotThree(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            scores[:, 3] = -torch.inf
            return scores

    def texts(**kwargs: Any) -> Any:
        torch.manual_seed(0)
        processors = LogitsProcessorList([NotThree()])
        return model.generate(IDS, max_new_tokens=30, do_sample=True, logits_processor=processors, **kwargs)

    model = toy_model()
    assert torch.equal(texts(), texts(custom_generate=lade.decode))


def test_the_logits_of_a_pass_are_ordinary():
    model = toy_model()
    runner = EagerRunner(model, lade.supports(model).require(), model.generation_config)
    cache, text = runner.tree_cache(), IDS[0].tolist()
    runner.prefill([text], cache)
    tree = TokenTree(3)
    tree.add(0, 4, "guess")
    assert not runner.forward([tree], [[*text, 3]], cache).is_inference()
    tree.add(1, 5, "guess")
    assert not runner.extend([tree], [2], cache).is_inference()


def test_a_model_can_be_trained_after_it():
    model: Any = family("llama").build(dtype=torch.float32)
    lade.generate(model, IDS, max_new_tokens=10, do_sample=False)
    model(IDS, labels=IDS).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


class Foreign(nn.Linear):
    """A layer of another package."""


CHANGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("foreign code", lambda model: model.model.layers[1].register_forward_hook(lambda *given: None)),
    ("hooks", lambda model: model.model.layers[1].register_forward_hook(forward_hook_of_torch)),
    ("replaced", lambda model: setattr(model, "forward", model.forward)),
    ("other packages", lambda model: setattr(model, "lm_head", Foreign(*reversed(model.lm_head.weight.shape)))),
    ("compiled", lambda model: model.model.layers[0].compile(backend="eager")),
    ("custom class", lambda model: model.lm_head.register_parameter("weight", Weight(model.lm_head.weight))),
    ("CPUs", lambda model: model.lm_head.to("meta")),
]


forward_hook_of_torch = torch.add
"""One that a trusted package has: any function of it."""


class Weight(nn.Parameter):
    """One that may do whatever it likes."""


@pytest.mark.parametrize(("reason", "change"), CHANGES, ids=[reason for reason, _ in CHANGES])
def test_whose_passes_are_recorded(reason, change):
    model: Any = family("llama").build(dtype=torch.float32)
    assert inference_mode_blocker(ModelFacts.of(model)) == ""
    change(model)
    assert reason in inference_mode_blocker(ModelFacts.of(model))


def test_frequencies_that_a_pass_replaces_are_recorded():
    for model in (family("phi3").build(**longrope()), family("llama").build(**DYNAMIC)):
        assert "frequencies" in inference_mode_blocker(ModelFacts.of(model))


PATCHED = [family("bloom"), *USUAL, *(case for case in RECURRENT_FAMILIES if str(case) == "lfm2")]


@pytest.mark.parametrize("case", [*PATCHED, TREE_ATTENTION, INVARIANT_ATTENTION, "autocast"], ids=str)
def test_states_patched_passes_masks_of_our_own_and_autocast_are_recorded(monkeypatch, case):
    model: Any = family("llama").build(dtype=torch.float32) if isinstance(case, str) else case.build()
    if case in (TREE_ATTENTION, INVARIANT_ATTENTION):
        model.set_attn_implementation(case)
    modes = note_modes(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"), warnings.catch_warnings():
        warnings.simplefilter("ignore", lade.PrecisionWarning)
        lade.generate(model, IDS, max_new_tokens=10, do_sample=False)
    assert len(modes) > 2 and not any(modes)


def keep_logits(seen: list[torch.Tensor], module: nn.Module, given: Any, output: Any) -> None:
    if hasattr(output, "logits"):
        seen.append(output.logits)


@pytest.mark.parametrize("everywhere", [False, True])
def test_what_a_hook_is_given_is_ordinary(everywhere):
    model, seen = toy_model(), list[torch.Tensor]()
    register = register_module_forward_hook if everywhere else model.register_forward_hook
    hook = register(partial(keep_logits, seen))
    try:
        lade.generate(model, IDS, max_new_tokens=10, do_sample=False)
    finally:
        hook.remove()
    assert len(seen) > 3 and not any(logits.is_inference() for logits in seen)


def test_an_engine_sees_a_hook_that_came_between_two_requests():
    model, seen = toy_model(), list[torch.Tensor]()
    arguments = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    with Engine(model) as engine:
        engine.add(IDS, **arguments).result()
        model.register_forward_hook(partial(keep_logits, seen))
        engine.add(IDS + 1, **arguments).result()
    assert len(seen) > 3 and not any(logits.is_inference() for logits in seen)


def test_what_an_attention_of_ones_own_is_given_is_ordinary(monkeypatch):
    sdpa, seen = ALL_ATTENTION_FUNCTIONS["sdpa"], list[torch.Tensor]()

    def keeping(module: nn.Module, query: torch.Tensor, *given: Any, **named: Any) -> Any:
        seen.append(query)
        return sdpa(module, query, *given, **named)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", keeping)
    lade.generate(toy_model(), IDS, max_new_tokens=10, do_sample=False)
    assert len(seen) > 10 and not any(query.is_inference() for query in seen)


def test_a_table_of_positions_that_grows_in_a_pass_is_ordinary():
    sizes = {"vocab_size": 64, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
    xglm = AutoConfig.for_model("xglm", **sizes, max_position_embeddings=64)
    decoder = randomize(AutoModelForCausalLM.from_config(xglm), seed=1).eval()
    decoder.generation_config = GenerationConfig()
    m2m = next(case for case in OTHERS if str(case) == "m2m_100").build(max_position_embeddings=32)
    for model in (decoder, m2m):
        before = [table.weights.shape for table in model.modules() if hasattr(table, "make_weights")]
        lade.generate(
            model, IDS, max_new_tokens=60 - IDS.shape[1], do_sample=False, lookahead=lade.LookaheadConfig(budget=32)
        )
        tables = [table.weights for table in model.modules() if hasattr(table, "make_weights")]
        assert [table.shape for table in tables] != before and not any(table.is_inference() for table in tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_made_ordinary_shares_its_memory(dtype):
    with torch.inference_mode():
        given = torch.arange(6).to(dtype).view(1, 2, 3)
    shared = ordinary(given)
    shared[0, 1] += 1
    assert torch.equal(given, shared) and shared.data_ptr() == given.data_ptr() and shared.dtype == dtype
    assert ordinary(shared) is shared
