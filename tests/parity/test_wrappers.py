"""Models in wrappers: PEFT's, accelerate's hooks, `torch.compile`, wrappers for several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from comparing import CONFIGS, DOORS, PAPER, assert_refused, assert_same, lookahead, plain, prompt
from families import family
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from pretend import short_trials

import lade

# PEFT asks transformers for a name that transformers is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LORA = {"r": 4, "lora_alpha": 32, "init_lora_weights": False, "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
OFFLOADED = pytest.mark.filterwarnings(
    "ignore:You are calling .generate.. with the `input_ids` being on a device type:UserWarning"
)


def adapted(base: Any, *targets: str, **fields: Any) -> Any:
    """A model with a LoRA for layers of these names, by default those for queries and values of a llama."""
    torch.manual_seed(1)
    settings = LoraConfig(target_modules=list(targets or ("q_proj", "v_proj")), **LORA, **fields)
    return get_peft_model(base, settings).double().eval()


def invariant_llama(monkeypatch: pytest.MonkeyPatch) -> Any:
    short_trials(monkeypatch)
    return lade.invariant(family("llama").build(dtype=torch.float32))


def offloaded(model: Any, offload: Callable[..., Any], folder: Path) -> Any:
    """The model, its weights elsewhere: in a folder, or in the memory beside those of an executing device."""
    where = {"offload_dir": str(folder)} if offload is disk_offload else {}
    return offload(model, execution_device=torch.device("cpu"), **where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ["q_proj", "v_proj", "down_proj"]),
        ("gpt2", ["c_attn"]),
        ("gemma3_text", ["q_proj", "k_proj"]),
        ("bloom", ["query_key_value"]),
        ("llama4_text", ["q_proj"]),
    ],
)
def test_a_model_with_a_lora_adapter(name, targets):
    base = family(name).build()
    bare = plain(base, prompt(10))
    model = adapted(base, *targets, fan_in_fan_out=name == "gpt2")
    assert lade.supports(model)
    stats = assert_same(model, prompt(10), CONFIGS[:2])
    assert stats.tokens_per_step > 1 and not torch.equal(plain(model, prompt(10)), bare), "the adapter does nothing"
    with model.disable_adapter():
        assert torch.equal(lookahead(model, prompt(10)), bare)


@pytest.mark.parametrize("before", [True, False], ids=["the base, then wrapped", "the wrapped one"])
def test_an_enabled_model_with_a_lora_adapter(before):
    base = family("llama").build()
    bare = plain(base, prompt(10), max_new_tokens=30)
    stats = lade.Stats()
    if before:
        lade.enable(base, PAPER, stats=stats)
    model = adapted(base)
    expected = lookahead(model, prompt(10), None, max_new_tokens=30)
    assert stats.generations == 0
    if not before:
        lade.enable(model, PAPER, stats=stats)
    assert torch.equal(plain(model, prompt(10), max_new_tokens=30), expected) and not torch.equal(expected, bare)
    assert stats.generations == 1 and stats.tokens_per_step > 1
    with model.disable_adapter():
        assert torch.equal(plain(model, prompt(10), max_new_tokens=30), bare)
    assert stats.generations == 2
    lade.disable(model)
    assert torch.equal(plain(model, prompt(10), max_new_tokens=30), expected) and stats.generations == 2
    assert "generate" not in {**vars(model), **vars(base)}


def test_a_wrapper_and_its_base_both_enabled():
    base, inner, outer = family("llama").build(), lade.Stats(), lade.Stats()
    lade.enable(base, PAPER, stats=inner)
    model = adapted(base)
    lade.enable(model, "auto", stats=outer)
    expected = lookahead(model, prompt(10), None, max_new_tokens=20)
    assert torch.equal(plain(model, prompt(10), max_new_tokens=20), expected)
    assert (inner.generations, outer.generations) == (0, 1)
    with pytest.warns(lade.FallbackWarning, match="use_cache=False"):
        plain(model, prompt(10), max_new_tokens=20, use_cache=False)
    assert (inner.generations, outer.generations) == (0, 2), "what the wrapper leaves to plain decoding is decoded so"


def test_lora_dropout_counts_in_training_mode():
    assert "training mode" in lade.supports(adapted(family("llama").build()).train()).reason


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning:UserWarning")
@pytest.mark.filterwarnings("ignore:Both `past_key_values` and `cache`:FutureWarning")  # of the adapter's own pass
def test_an_adapter_that_puts_tokens_before_the_prompt_is_refused():
    model: PeftModel = get_peft_model(
        family("llama").build(dtype=torch.float32), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    ).eval()
    arguments = {"input_ids": prompt(10), "max_new_tokens": 20, "lookahead": PAPER}
    for door in ("generate", "custom", "enable"):
        with pytest.raises(lade.UnsupportedModelError, match="puts learned tokens before the prompt"):
            DOORS[door](model, **arguments)
    assert lade.supports(model.get_base_model()), "without its adapter it is an ordinary model"
    expected = plain(model, prompt(10), max_new_tokens=20)
    with pytest.warns(lade.FallbackWarning):
        ours = lookahead(model, prompt(10), "auto", max_new_tokens=20)
    assert torch.equal(ours, expected)
    for enabled in (model, model.get_base_model()):
        stats = lade.Stats()
        lade.enable(enabled, stats=stats)
        assert torch.equal(plain(model, prompt(10), max_new_tokens=20), expected)
        assert "puts learned tokens before the prompt" in str(stats.fallback)  # the warning came before, once per model
        lade.disable(model)


@OFFLOADED
@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_a_wholly_offloaded_model(offload, tmp_path):
    expected = plain(family("llama").build(), prompt(10))
    model = offloaded(family("llama").build(), offload, tmp_path)
    assert torch.equal(lookahead(model, prompt(10), PAPER), expected)


@OFFLOADED
@pytest.mark.by_processor
@pytest.mark.parametrize("offload", [cpu_offload, disk_offload])
def test_an_invariant_model_that_is_offloaded(offload, tmp_path, monkeypatch):
    model = invariant_llama(monkeypatch)
    expected = plain(model, prompt(10), max_new_tokens=16)
    offloaded(model, offload, tmp_path)
    assert torch.equal(lookahead(model, prompt(10), PAPER, max_new_tokens=16), expected)
    with pytest.raises(lade.UnsupportedModelError, match="has hooks, of accelerate"):
        lade.variant(model)
    with pytest.raises(lade.UnsupportedModelError, match="it is on meta"):
        lade.invariant(model)
    assert torch.equal(plain(model, prompt(10), max_new_tokens=16), expected)


@pytest.mark.parametrize("wrapped", [True, False], ids=["the compiled one", "the one inside"])
def test_an_enabled_compiled_model(wrapped):
    model = family("llama").build()
    expected = plain(model, prompt(10), max_new_tokens=30)
    compiled = torch.compile(model, backend="eager")
    stats = lade.Stats()
    assert torch.equal(lookahead(compiled, prompt(10), PAPER, max_new_tokens=30), expected)
    lade.enable(compiled if wrapped else model, PAPER, stats=stats)
    for each in (compiled, model):
        assert torch.equal(plain(each, prompt(10), max_new_tokens=30), expected)
    assert stats.generations == 2 and stats.tokens_per_step > 1
    lade.disable(compiled)
    assert "generate" not in vars(model)


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """What is compiled runs as it is: here it counts that it is compiled."""
    with torch.compiler.set_stance("force_eager"):
        yield


COMPILED = pytest.mark.parametrize(
    "compiled",
    [
        lambda model, **options: setattr(model, "forward", torch.compile(model.forward, **options)),
        lambda model, **options: model.compile(**options),
    ],
    ids=["its forward", "in place"],
)


@pytest.mark.slow
@COMPILED
@pytest.mark.parametrize("options", [{"backend": "eager", "dynamic": True}, {"backend": "aot_eager"}], ids=str)
def test_a_model_compiled_in_place(compiled, options):
    model = family("llama").build()
    expected = plain(model, prompt(10), max_new_tokens=30)
    compiled(model, **options)
    assert torch.equal(plain(model, prompt(10), max_new_tokens=30), expected)
    assert torch.equal(lookahead(model, prompt(10), PAPER, max_new_tokens=30), expected)


@pytest.mark.usefixtures("uncompiled")
@COMPILED
def test_a_model_that_has_to_be_one_graph_is_decoded_plainly(compiled):
    model = family("llama").build()
    compiled(model, backend="eager", fullgraph=True)
    assert_refused(model, prompt(10), r"fullgraph=True.*compile it without", max_new_tokens=20)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.by_processor
@COMPILED
def test_an_invariant_model_that_is_compiled_is_decoded_plainly(compiled, monkeypatch):
    model = invariant_llama(monkeypatch)
    compiled(model, backend="eager")
    with pytest.warns(lade.FallbackWarning, match="compiled after it was made invariant"):
        assert_same(model, prompt(10), ["auto"], max_new_tokens=20)
    with pytest.raises(lade.UnsupportedModelError, match="it is compiled"):
        lade.invariant(model)


@pytest.mark.by_processor
def test_an_invariant_model_under_autocast_is_decoded_plainly(monkeypatch):
    """Its products were tried in the dtype that they have."""
    model = invariant_llama(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(lade.FallbackWarning, match="leave torch.autocast"):
        assert_same(model, prompt(10), ["auto"], max_new_tokens=20)
    assert lade.supports(model)


@pytest.mark.parametrize(
    "door",
    [
        lambda model: lade.generate(model, input_ids=prompt(10), max_new_tokens=5),
        lambda model: lade.generate(model, input_ids=prompt(10), max_new_tokens=5, lookahead=None),
        lambda model: lade.stream(model, input_ids=prompt(10), max_new_tokens=5),
        lade.enable,
        lade.Engine,
        lade.pack,
        lade.invariant,
        lambda model: lade.supports(model).require(),
    ],
    ids=["generate", "plainly", "stream", "enable", "Engine", "pack", "invariant", "supports"],
)
def test_a_wrapper_without_generate_names_the_model_inside(door):
    model = family("llama").build()
    before = list(model.modules())
    with pytest.raises(lade.UnsupportedModelError, match=r"DataParallel.*pass the wrapped model, its \.module"):
        door(torch.nn.DataParallel(model).eval())
    assert list(model.modules()) == before
    with pytest.raises(lade.UnsupportedModelError, match="LlamaModel has no generate; give a transformers"):
        lade.generate(model.model, input_ids=prompt(10), max_new_tokens=5)
