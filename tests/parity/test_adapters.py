"""PEFT's adapters that are on the model, or are what they are, only while one `model.generate` runs."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import comparing
import peft
import pytest
import torch
from comparing import CONFIGS, DOORS, PAPER, assert_same, batch, custom, only_fallback, plain, prompt, streamed
from families import family
from inside import hooks_of
from peft import LoraConfig, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

import lade
from lade.backends.adapters import MIXING, TOKEN_WISE, UNSUPPORTED_ADAPTERS

# PEFT asks transformers for a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LORA = {"r": 4, "lora_alpha": 32, "init_lora_weights": False, "target_modules": ["q_proj", "v_proj", "down_proj"]}
PROMPT = prompt(12)
NEW = {"max_new_tokens": 30, "do_sample": False}


def adapted(**more: dict[str, Any]) -> Any:
    """A llama with an ordinary LoRA, "default", and others of these names and fields."""
    torch.manual_seed(1)
    model = get_peft_model(family("llama").build(), LoraConfig(task_type="CAUSAL_LM", **LORA))
    for name, fields in more.items():
        model.add_adapter(name, LoraConfig(task_type="CAUSAL_LM", **LORA, **fields))
    return model.double().eval()


def activated() -> dict[str, Any]:
    return {"alora_invocation_tokens": PROMPT[0, 5:7].tolist()}


WAYS = {name: DOORS[name] for name in ("generate", "custom", "stream", "engine")}


def assert_left_to_plain(model: Any, way: str, said: str, **arguments: Any) -> torch.Tensor:
    """Assert that a call is refused with this reason and plain under `auto`; returns the text."""
    expected: torch.Tensor = model.generate(**arguments)
    with pytest.raises(lade.UnsupportedModelError, match=said):
        WAYS[way](model, lookahead=PAPER, **arguments)
    assert not hooks_of(model)
    with pytest.warns(lade.FallbackWarning, match=said) as caught:
        assert torch.equal(WAYS[way](model, **arguments), expected)
    only_fallback(caught.list)
    return expected


# --- activated LoRA --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_an_activated_lora_is_refused_by_name_and_decoded_plainly_under_auto(way):
    model = adapted(later=activated())
    model.set_adapter("later")
    assert "alora_invocation_tokens" in lade.supports(model).reason
    said = r"activated LoRA \(alora_invocation_tokens\)"
    if way == "engine":  # which decodes with its own passes alone
        with pytest.raises(lade.UnsupportedModelError, match=said + ".*set_adapter"):
            WAYS[way](model, input_ids=PROMPT, lookahead=PAPER, **NEW)
        return
    expected = assert_left_to_plain(model, way, said, input_ids=PROMPT, **NEW)
    assert not hooks_of(model)
    with model.disable_adapter():
        assert not torch.equal(expected, plain(model, PROMPT, **NEW)), "the adapter does nothing"


def test_only_the_adapter_that_is_active_counts():
    model = adapted(later=activated())
    assert_same(model, PROMPT, **NEW)
    model.set_adapter("later")
    assert not lade.supports(model)
    with model.disable_adapter():
        assert_same(model, PROMPT, **NEW)
    model.base_model.set_adapter(["default", "later"])
    assert not lade.supports(model)
    model.set_adapter("default")
    assert_same(model, PROMPT, **NEW)
    model.merge_adapter()
    assert_same(model, PROMPT, **NEW)


# --- adapter_names ---------------------------------------------------------------------------------------------------


@pytest.mark.one_in(8)
@pytest.mark.parametrize("way", ["generate", "custom"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_adapter_named_for_one_prompt(way, do_sample):
    model = adapted(two={})
    arguments = {"input_ids": PROMPT, **NEW, "do_sample": do_sample, "adapter_names": ["two"]}
    torch.manual_seed(7)
    expected = model.generate(**arguments)
    torch.manual_seed(7)
    assert not torch.equal(expected, model.generate(**{**arguments, "adapter_names": ["default"]}))
    torch.manual_seed(7)
    assert torch.equal(WAYS[way](model, lookahead=PAPER, **arguments), expected)
    assert not hooks_of(model)


@pytest.mark.parametrize("way", ["stream", "engine"])
def test_an_adapter_named_for_what_goes_on_after_the_call_is_refused(way):
    model = adapted(two={})
    remedy = "set_adapter" if way == "stream" else "lade.generate"
    said = rf"adapter_names .* only while .*generate runs; .*{remedy}"
    with pytest.raises(lade.UnsupportedArgumentError, match=said):
        WAYS[way](model, input_ids=PROMPT, lookahead=PAPER, adapter_names=["two"], **NEW)
    assert not hooks_of(model)


def test_an_adapter_named_for_a_stream_is_plains_under_auto():
    model = adapted(two={})
    expected = plain(model, PROMPT, adapter_names=["two"], **NEW)
    with pytest.warns(lade.FallbackWarning, match="adapter_names cannot be used with lade.stream") as caught:
        assert torch.equal(streamed(model, input_ids=PROMPT, adapter_names=["two"], **NEW), expected)
    assert caught[0].filename == comparing.__file__, "the warning points at its caller"


def test_an_engine_refuses_hooks_that_plain_decoding_has_left():
    model = adapted(two={})
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(input_ids=PROMPT, adapter_names=["two"], max_new_tokens=-1)
    assert hooks_of(model), "PEFT cleans up by itself: then this test, and what it tests, can go"
    with lade.Engine(model) as engine, pytest.raises(lade.UnsupportedArgumentError, match="adapter_names"):
        engine.add(PROMPT, **NEW)


BATCH = {"input_ids": torch.cat([PROMPT, PROMPT.flip(1)]), **NEW}
SEVERAL = {
    "batch": {**BATCH, "adapter_names": ["default", "two"]},
    "base": {**BATCH, "adapter_names": ["__base__", "two"]},
    "one for all": {**BATCH, "adapter_names": ["two", "two"]},
    "beams": {"input_ids": PROMPT, **NEW, "num_beams": 2, "adapter_names": ["two"]},
}


@pytest.mark.one_in(16)
@pytest.mark.parametrize("way", ["generate", "custom"])
@pytest.mark.parametrize("case", SEVERAL)
def test_adapters_named_for_several_rows_are_refused(case, way):
    model = adapted(two={})
    try:
        model.generate(**SEVERAL[case])
    except ValueError:
        assert case == "beams", "of adapter_names, old versions of PEFT cannot have beams"
        pytest.skip("plain decoding fails with this PEFT")
    assert_left_to_plain(model, way, "adapter_names are for a whole batch", **SEVERAL[case])
    assert not hooks_of(model)
    assert_same(model, PROMPT, **NEW)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["generate", "custom"])
def test_an_activated_lora_among_the_adapters_named(way):
    arguments = {"input_ids": PROMPT, "adapter_names": ["later"], **NEW}
    assert_left_to_plain(adapted(later=activated()), way, "activated LoRA", **arguments)


@pytest.mark.parametrize(("way", "config"), [("generate", PAPER), ("generate", None), ("stream", None)])
def test_a_call_that_fails_leaves_no_hooks(way, config):
    model = adapted(two={})
    with pytest.raises(ValueError, match="max_new_tokens"):
        WAYS[way](model, lookahead=config, input_ids=PROMPT, adapter_names=["two"], max_new_tokens=-1)
    assert not hooks_of(model)


@pytest.mark.parametrize("way", ["generate", "custom"])
def test_a_generation_broken_off_leaves_no_hooks(way):
    model = adapted(two={})

    def interrupt(*_: Any) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        WAYS[way](model, input_ids=PROMPT, adapter_names=["two"], stopping_criteria=[interrupt], **NEW)
    assert not hooks_of(model)


# --- other adapters --------------------------------------------------------------------------------------------------


def bare() -> Any:
    return family("llama").build(dtype=torch.float32)


def _of_kind(kind: str) -> Any:
    """A llama with an adapter of a kind, its weights moved, so that it does something."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)]
    known = {field.name for field in dataclasses.fields(config)}
    fours = ("r", "oft_block_size", "boft_block_size", "block_size", "num_frequency", "vector_length")
    wanted = {
        "target_modules": ["q_proj", "o_proj"], "feedforward_modules": [], "group_size": 16, "n_frequency": 10,
        "num_vectors": 8, "total_step": 10, "token_indices": [1, 2, 3], "n_tasks": 2, **dict.fromkeys(fours, 4),
    }  # fmt: skip
    wanted.pop({"OFT": "r", "SHADOW": "target_modules"}.get(kind, ""), None)
    fields = {name: value for name, value in wanted.items() if name in known}
    model = get_peft_model(bare(), config(task_type="CAUSAL_LM", **fields)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


KINDS = sorted(kind for kind in TOKEN_WISE if kind.upper() in PEFT_TYPE_TO_CONFIG_MAPPING)
USUAL = ("ia3", "lokr", "vera")


@pytest.mark.one_in(6)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [it if it in USUAL else pytest.param(it, marks=pytest.mark.slow) for it in KINDS])
def test_an_adapter_that_looks_at_one_token_is_served(kind):
    model = _of_kind(kind.upper())
    assert not torch.equal(plain(model, PROMPT, **NEW), plain(bare(), PROMPT, **NEW)), "the adapter does nothing"
    assert assert_same(model, PROMPT, CONFIGS[:2], **NEW).tokens_per_step > 1
    assert_same(model, **batch(12, 5), **NEW)


LILY = pytest.mark.skipif("LILY" not in PEFT_TYPE_TO_CONFIG_MAPPING, reason="this PEFT has no Lily")


@LILY
@pytest.mark.parametrize("known", [True, False])
def test_an_adapter_that_mixes_tokens_is_refused(known, monkeypatch):
    if not known:
        monkeypatch.setattr("lade.backends.adapters.MIXING", MIXING - {"lily"})
    model = _of_kind("LILY")
    for way in WAYS.values():
        with pytest.raises(lade.UnsupportedModelError, match=r"its adapter \(lily, of .*\) mixes the tokens of a pass"):
            way(model, input_ids=PROMPT, lookahead=PAPER, **NEW)
    with pytest.warns(lade.FallbackWarning, match="lily"):
        assert_same(model, PROMPT, ["auto"], **NEW)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", sorted(kind for kind in UNSUPPORTED_ADAPTERS if kind in PEFT_TYPE_TO_CONFIG_MAPPING))
def test_an_adapter_that_changes_the_passes_is_refused(kind, tmp_path):
    if kind == "XLORA":
        base = family("llama").build()
        base.config.use_cache = False
        config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters={"0": str(tmp_path)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted().save_pretrained(tmp_path, selected_adapters=["default"])
            model = get_peft_model(base, config).eval()
    else:
        model = _of_kind(kind)
    call = {"task_ids": torch.tensor([1])} if kind == "POLY" else {}
    assert UNSUPPORTED_ADAPTERS[kind] in lade.supports(model).reason
    with pytest.warns(lade.FallbackWarning, match="its adapter"):
        ours = lade.generate(model, input_ids=PROMPT, **call, **NEW)
    assert torch.equal(ours, model.generate(input_ids=PROMPT, **call, **NEW))
    with pytest.raises(lade.UnsupportedModelError, match="from pass to pass"):
        custom(model, input_ids=PROMPT, lookahead=PAPER, **call, **NEW)


# --- contexts of the caller ------------------------------------------------------------------------------------------


def test_an_engine_refuses_requests_under_autocast():
    model, said = bare(), r"torch\.autocast cannot be used with lade\.Engine"
    with lade.Engine(model) as engine:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(lade.UnsupportedArgumentError, match=said):
            engine.add(PROMPT, **NEW)
        assert torch.equal(engine.add(PROMPT, **NEW).result(60.0), plain(model, PROMPT, **NEW))
