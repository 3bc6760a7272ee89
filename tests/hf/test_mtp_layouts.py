"""MTP layers of models that are packed, invariant or decoded by several processes, and of checkpoints with a folder."""

import json
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from mtp_toys import heard, llama, llama_with_mtp, load, write_checkpoint
from pretend import short_trials
from safetensors.torch import load_file, save_file
from same_as_plain import assert_same_tokens
from spies import failing
from torch.nn import Linear
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_layers import MtpLayer

import lade
from lade import LookaheadConfig, UnsupportedArgumentError
from lade.backends.cpu.packing import pack
from lade.backends.cpu.packing.integers import Int4Linear, Int8Linear
from lade.backends.cpu.packing.linear import PackedLinear
from lade.backends.mtp.load import layer_of

sys.path.append(str(Path(__file__).parent.parent / "cluster"))

from processes import in_processes

PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
PROMPTS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
WAYS = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.7}}
BUDGET = LookaheadConfig(budget=8, mtp=True)


@pytest.fixture(scope="module", params=["packed", "packed after loading", "invariant", "invariant after loading"])
def model(request, tmp_path_factory):
    change, _, loaded = request.param.partition(" ")
    dtype = torch.float32 if change == "packed" else torch.bfloat16
    model = llama_with_mtp(tmp_path_factory.mktemp("mtp"), dtype=dtype)
    assert not loaded or layer_of(model)
    with pytest.MonkeyPatch.context() as patch:
        short_trials(patch)
        yield lade.pack(model, min_weights=1) if change == "packed" else lade.invariant(model)


@pytest.mark.one_in(3)
@pytest.mark.by_processor
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ids", [PROMPT, PROMPTS], ids=["row", "batch"])
def test_texts_are_plains(model, way, ids):
    assert_same_tokens(model, BUDGET, input_ids=ids, max_new_tokens=24, pad_token_id=0, **WAYS[way])
    assert heard(model)


@pytest.mark.by_processor
def test_engines(model):
    ways = [*WAYS.values()] * 2
    asked = [(PROMPT[:, : 4 + at], {"max_new_tokens": 15 + 5 * at, **way}) for at, way in enumerate(ways)]
    with lade.Engine(model) as engine:
        config = LookaheadConfig(budget=8)
        handles = [engine.add(ids, lookahead=config, seed=seed, **given) for seed, (ids, given) in enumerate(asked)]
        for number, (handle, (ids, arguments)) in enumerate(zip(handles, asked, strict=True)):
            torch.manual_seed(number)
            assert torch.equal(handle.result(60), model.generate(ids, **arguments)), number


@pytest.mark.by_processor
@pytest.mark.parametrize(
    ("weights", "kind"),
    [(None, PackedLinear), ("int8", Int8Linear), ("int4", Int4Linear), (None, Linear)],
    ids=["packed", "int8", "int4", "dense"],
)
@pytest.mark.parametrize("loaded", [False, True], ids=["before", "after"])
def test_the_layer_is_packed_like_its_model(tmp_path, monkeypatch, weights, kind, loaded):
    write_checkpoint(llama(dtype=torch.float32, hidden=256, width=512), tmp_path)
    model = load(tmp_path, torch.float32)
    if loaded:
        assert layer_of(model)
    if kind is not Linear:
        lade.pack(model, weights=weights)
    if weights:
        lade.invariant(model)
    monkeypatch.setattr(pack, "faster_panel", None)  # its products are the model's, without another measurement
    plain = model.generate(PROMPT, max_new_tokens=16, pad_token_id=0)
    assert torch.equal(lade.generate(model, PROMPT, max_new_tokens=16, pad_token_id=0, lookahead=BUDGET), plain)
    large = ["eh_proj", "gate_proj", "up_proj", "down_proj"]
    layer = layer_of(model).mtp.layers
    kinds = {type(module) for name, module in layer.named_modules() if name.split(".")[-1] in large}
    assert kinds == {kind} and heard(model)
    assert lade.supports(model).mtp.loaded


@contextmanager
def rewritten(folder):
    """The weights of a checkpoint, which are written back."""
    file = folder / "model.safetensors"
    yield (weights := load_file(file))
    save_file(weights, file, metadata={"format": "pt"})


def test_a_layer_with_broken_weights_is_left_out(tmp_path):
    write_checkpoint(llama(), tmp_path)
    with rewritten(tmp_path) as weights:
        weights["mtp.fc.weight"][0, 0] = torch.nan
    model = load(tmp_path)
    plain = model.generate(PROMPT, max_new_tokens=10)
    assert torch.equal(lade.generate(model, PROMPT, max_new_tokens=10), plain)
    assert "not finite" in lade.supports(model).mtp.reason
    with pytest.raises(UnsupportedArgumentError, match="not finite"):
        lade.generate(model, PROMPT, max_new_tokens=10, lookahead=BUDGET)


def in_parts(place):
    """What a process of two gets: whether the text is plain's, and why there is no layer."""
    reference, model = load(place), lade.parallel(load(place))
    expected = reference.generate(PROMPT, max_new_tokens=30)
    same = torch.equal(lade.generate(model, PROMPT, max_new_tokens=30, lookahead=LookaheadConfig(budget=8)), expected)
    return [same, lade.supports(model).mtp.reason]


@pytest.mark.distributed
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_processes_with_a_part_of_each_tree_draft_without_the_layer(tmp_path):
    write_checkpoint(llama(), tmp_path)
    reason = "each process of lade.parallel has the hidden states of a part of the tree only"
    assert in_processes(2, lambda rank: in_parts(tmp_path)) == [[True, reason]] * 2


def test_a_layer_in_a_folder_of_its_own_is_found_and_not_reported(tmp_path, caplog):
    """Unlike among the weights of a model whose class ignores no such names."""
    caplog.set_level("WARNING", "transformers")
    write_checkpoint(llama(dtype=torch.float32), tmp_path)
    LlamaForCausalLM.from_pretrained(tmp_path)
    assert "UNEXPECTED" in caplog.text
    caplog.clear()
    with rewritten(tmp_path) as weights:
        own = {name: weights.pop(name) for name in [*weights] if name.startswith("mtp.")}
    (tmp_path / "mtp").mkdir()
    save_file(own, tmp_path / "mtp" / "model.safetensors", metadata={"format": "pt"})
    model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert "UNEXPECTED" not in caplog.text
    arguments = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0}
    ours = lade.generate(model, PROMPT, lookahead=BUDGET, **arguments)
    assert torch.equal(ours, model.generate(PROMPT, **arguments)) and heard(model)
    (tmp_path / "mtp" / "model.safetensors").unlink()
    with pytest.raises(UnsupportedArgumentError, match="has no weights of MTP layers"):
        lade.generate(LlamaForCausalLM.from_pretrained(tmp_path).eval(), PROMPT, lookahead=BUDGET, **arguments)


UP = "mtp.layers.0.mlp.up_proj.weight"


def cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def quantised(folder):
    with rewritten(folder) as weights:
        weights[UP] = weights[UP].to(torch.float8_e4m3fn)
        weights[f"{UP}_scale_inv"] = torch.ones(1, 1)


def short_of_a_weight(folder):
    with rewritten(folder) as weights:
        del weights[UP]


LOST = {"weight_map": {"mtp.fc.weight": "model-2-of-2.safetensors"}}
DAMAGES = {
    "gone": shutil.rmtree,
    "cut": cut,
    "a pointer": lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
    "an index of nothing": lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(LOST)),
    "an index of no kind": lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
    "quantised": quantised,
    "short of a weight": short_of_a_weight,
    "on meta": lambda folder: None,  # what is offloaded is the model
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_files_that_are_no_layer_any_more_cost_drafts_and_never_the_text(tmp_path, damage):
    copies = tmp_path / "copy"
    model = llama_with_mtp(tmp_path / "whole", dtype=torch.float32)
    shutil.copytree(tmp_path / "whole", copies)
    model.config._name_or_path = str(copies)
    plain = model.generate(PROMPT, max_new_tokens=12)
    DAMAGES[damage](copies)
    if damage == "on meta":
        pytest.importorskip("accelerate").cpu_offload(model, execution_device=torch.device("cpu"))
    if damage != "short of a weight":  # which shows when it is loaded
        assert lade.supports(model).mtp.reason
    for config in ("auto", LookaheadConfig(budget=8)):
        assert torch.equal(lade.generate(model, PROMPT, max_new_tokens=12, lookahead=config), plain)
    if damage != "on meta":  # engines refuse models with hooks
        with lade.Engine(model) as engine:
            handle = engine.add(PROMPT, max_new_tokens=12, lookahead=LookaheadConfig(budget=8))
            assert torch.equal(handle.result(60), plain[:1])
    assert lade.supports(model).mtp.reason
    with pytest.raises(UnsupportedArgumentError, match="mtp=True cannot be used"):
        lade.generate(model, PROMPT, max_new_tokens=12, lookahead=BUDGET)


@pytest.mark.parametrize("calls", [1, 2, 7])
def test_a_pass_of_the_layer_that_fails_ends_its_use_and_not_the_text(tmp_path, monkeypatch, caplog, calls):
    model = llama_with_mtp(tmp_path)
    plain = model.generate(PROMPTS, max_new_tokens=30, do_sample=False)
    block = layer_of(model).mtp.layers[0]
    failed = failing(monkeypatch, block, "forward", RuntimeError("out of memory"), calls=range(calls, 100))
    assert torch.equal(lade.generate(model, PROMPTS, max_new_tokens=30, lookahead=BUDGET), plain)
    assert len(failed) == 1 and "texts go on without it" in caplog.text
    with lade.Engine(model) as engine:
        handle = engine.add(PROMPT, max_new_tokens=30, lookahead=LookaheadConfig(budget=8))
        assert torch.equal(handle.result(60), plain[:1])
    assert "RuntimeError: out of memory" in lade.supports(model).mtp.reason and len(failed) == 1


def test_loading_a_layer_changes_nothing_of_the_process(tmp_path, monkeypatch):
    """Other threads make tensors and modules meanwhile."""
    model = llama_with_mtp(tmp_path, dtype=torch.bfloat16)
    changes = []
    monkeypatch.setattr(torch, "set_default_dtype", changes.append)
    before = {name: getattr(torch.nn.init, name) for name in dir(torch.nn.init)}
    whole = MtpLayer.__init__

    def making(*inputs):
        assert {name: getattr(torch.nn.init, name) for name in dir(torch.nn.init)} == before
        changes.append("made")
        whole(*inputs)

    monkeypatch.setattr(MtpLayer, "__init__", making)
    assert not isinstance(layer_of(model), str) and changes == ["made"]


def test_a_saved_packed_model_keeps_its_layer(tmp_path):
    write_checkpoint(llama(dtype=torch.float32, hidden=256, width=512), tmp_path / "whole", prefix=None)
    model = lade.pack(load(tmp_path / "whole", torch.float32), weights="int8")
    lade.save_packed(model, tmp_path / "packed")
    again = lade.invariant(lade.load_packed(tmp_path / "packed"))
    assert lade.supports(again).mtp.layers == 1
    ours, theirs = (layer_of(each).mtp.layers.state_dict() for each in (again, model))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    shutil.rmtree(tmp_path / "whole")
    without = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path / "packed")).eval()  # which promises a layer
    with pytest.warns(UserWarning, match="saved without an MTP layer"):
        lade.save_packed(lade.pack(without, weights="int8"), tmp_path / "without")
