"""Prepacked linear layers: the same tokens, the same weights back, and a refusal of everything else."""

import copy
import pickle
import threading

import accelerate
import peft
import pytest
import torch
from small_models import small_model
from spies import failing
from torch import nn
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.pytorch_utils import Conv1D

import lade
from lade.backends.cpu.packing import pack as packing
from lade.backends.cpu.packing.pack import PackedLinear, packable, packed_layers
from lade.errors import UnsupportedModelError
from lade.testing import toy_model

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",  # PEFT, with transformers 5.23
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",  # torch.compile, of torch itself
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning",  # GPTBigCode, in old versions of transformers
)
VOCABULARY = 48
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip
OTHERS = {
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 12},
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "deepseek_v3": LATENT,
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gpt_bigcode": {"multi_query": True, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}
FAMILIES = ["llama", "qwen3", "gpt2", *OTHERS]


def build(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    if family not in OTHERS:
        return toy_model(family, vocabulary=VOCABULARY, dtype=dtype)
    return small_model(family, dtype, **OTHERS[family])


def packed(model, **options):
    return lade.pack(model, min_weights=1, **options)


def linears(model) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]


@torch.no_grad()
def logits(model, ids=PROMPT):
    return model(ids).logits


def continuations(model, new=40):
    plain = model.generate(PROMPT, max_new_tokens=new, do_sample=False)
    sizes = lade.LookaheadConfig(window=4, ngram=3, guesses=4)
    return plain, lade.generate(model, input_ids=PROMPT, max_new_tokens=new, do_sample=False, lookahead=sizes)


def refused(action, *words):
    with pytest.raises(UnsupportedModelError) as caught:
        action()
    for word in words:
        assert word in str(caught.value), caught.value


# What a packed model computes


@pytest.mark.one_in(12)
@pytest.mark.parametrize("family", FAMILIES)
def test_lookahead_on_a_packed_model_writes_the_tokens_of_plain_decoding(family):
    model = build(family)
    before = model.generate(PROMPT, max_new_tokens=40, do_sample=False)
    count = len(linears(model))
    assert packed(model) is model
    assert packed_layers(model) == count and not linears(model)
    assert lade.supports(model)
    plain, ours = continuations(model)
    assert torch.equal(plain, ours)
    assert torch.equal(plain, before), "toy logits have no near ties"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "near", "keep"),
    [(torch.float32, 1e-4, False), (torch.bfloat16, 0.05, False), (torch.float32, 1e-4, True)],
)
def test_logits_are_those_of_the_dense_model(family, dtype, near, keep):
    model = build(family, dtype)
    dense = [logits(model, torch.arange(length)[None]) for length in (1, 16, 37)]
    packed(model, keep_original=keep)
    for expected in dense:
        found = logits(model, torch.arange(expected.shape[1])[None])
        assert torch.allclose(found, expected, atol=near * expected.abs().max().item(), rtol=0)
        # Where the processor multiplies bfloat16 both run the same kernel, bit for bit; elsewhere a rounding apart.
        if dtype == torch.bfloat16 and family != "gpt_bigcode" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            assert torch.equal(found, expected)


@pytest.mark.parametrize("layer", [nn.Linear(24, 40), nn.Linear(24, 40, bias=False), Conv1D(40, 24)])
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(24), torch.randn(7, 24), torch.randn(2, 3, 4, 24), torch.randn(24, 5).T, torch.randn(5, 48)[:, ::2],
        torch.randn(0, 24), torch.randn(2, 0, 24), torch.randn(1, 24).expand(6, 24),
    ],
    ids=lambda x: f"{tuple(x.shape)}{tuple(x.stride())}",
)  # fmt: skip
@torch.no_grad()
def test_inputs_of_any_shape(layer, x):
    if isinstance(layer, Conv1D):
        x = x.contiguous()
    expected = layer(x)
    model = packed(nn.Sequential(copy.deepcopy(layer)).eval())
    found = model(x)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.allclose(found, expected, atol=1e-5)


def test_gradients_are_refused():
    model = packed(build("llama"))
    refused(lambda: model(PROMPT), "no gradients", "torch.no_grad()", "lade.unpack(model)")
    assert torch.equal(logits(model.requires_grad_(False)), model(PROMPT).logits), "without parameters to train"
    bias = packed(nn.Sequential(nn.Linear(4, 4)).eval())
    refused(lambda: bias(torch.randn(2, 4)), "no gradients")
    with torch.inference_mode():
        assert model(PROMPT).logits.shape == (1, 8, VOCABULARY)


@torch.no_grad()
def test_autocast_works_where_it_asks_for_the_packed_dtype():
    layer = nn.Linear(24, 40).bfloat16()
    x = torch.randn(3, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(packed(nn.Sequential(copy.deepcopy(layer)).eval())(x), layer(x))
        model = packed(nn.Sequential(nn.Linear(24, 40)).eval())
        refused(lambda: model(x), "float32", "autocast to bfloat16", "lade.unpack")


@pytest.mark.parametrize("lookahead", ["auto", None, lade.LookaheadConfig(3, 3, 3)])
def test_another_dtype_of_autocast_is_refused_before_any_work(lookahead):
    """Plain decoding could not serve it either: there is no fallback, and a streamer has got nothing."""
    model, streamer, passes = packed(build("llama")), Heard(), []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    given = {"input_ids": PROMPT, "max_new_tokens": 5, "do_sample": False, "lookahead": lookahead}
    with torch.autocast("cpu", torch.bfloat16):
        refused(lambda: lade.generate(model, streamer=streamer, **given), "packed in float32", "autocast to bfloat16")
        refused(lambda: lade.stream(model, **given), "packed in float32")
        refused(lambda: model.generate(custom_generate=lade.decoder(streamer=streamer), **given), "packed in float32")
    assert not passes and not streamer.calls
    with torch.autocast("cpu", torch.float16, enabled=False):
        lade.generate(model, streamer=streamer, **given)
    assert len(streamer.calls) == 1 + 5 + 1


class Heard(BaseStreamer):
    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value)

    def end(self):
        self.calls.append("end")


# What packing leaves, frees and brings back


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_unpacking_brings_every_weight_back_bit_for_bit(family, keep, dtype):
    model = build(family, dtype)
    first = linears(model)[0]
    first.weight.requires_grad_(False)
    first.weight.noted_by_transformers = True
    before = copy.deepcopy(model)
    parts = dict(model.named_modules())
    assert lade.unpack(packed(model, keep_original=keep)) is model
    assert dict(model.named_modules()) == parts, "the very same modules"
    found, expected = dict(model.named_parameters()), dict(before.named_parameters())
    assert list(found) == list(expected)
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name
        assert parameter.requires_grad == expected[name].requires_grad, name
    assert first.weight.noted_by_transformers
    assert torch.equal(logits(model), logits(before))


def test_every_bit_comes_back():
    layer = nn.Linear(40, 24, bias=False)
    layer.weight.data.view(-1)[:6] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-45])
    bits = layer.weight.detach().clone().view(torch.int32)
    lade.unpack(packed(nn.Sequential(layer).eval()))
    assert torch.equal(layer.weight.detach().view(torch.int32), bits)


@pytest.mark.parametrize("keep", [False, True])
def test_a_tied_head_is_packed_and_the_embedding_survives(keep):
    model = build("gpt2")
    embedding = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is embedding
    packed(model, keep_original=keep)
    assert isinstance(model.get_output_embeddings(), PackedLinear)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight is embedding
    model.tie_weights()
    lade.unpack(model)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight is embedding


def test_the_original_weights_are_freed_or_kept():
    model = build("llama")
    weight = model.lm_head.weight
    packed(model, keep_original=True)
    assert model.lm_head.weight is weight
    lade.unpack(model)
    assert model.lm_head.weight is weight
    packed(model)
    head = model.lm_head
    assert head.weight is not weight and head.layer.weight is None
    assert (head.weight.shape, head.weight.dtype, head.weight.is_mkldnn) == (weight.shape, weight.dtype, True)
    assert torch.equal(head.weight.to_dense(), weight)
    assert (head.in_features, head.out_features, head.bias) == (32, VOCABULARY, None)
    assert "in_features=32, out_features=48, bias=False" in repr(head)


def written(weight):
    with torch.no_grad():
        weight.neg_()


def assigned(weight):
    weight.data = -weight.data


def in_shared_memory(weight):
    weight.data.share_memory_()


@pytest.mark.parametrize("options", [{}, {"weights": "int8"}], ids=["float32", "int8"])
@pytest.mark.parametrize("change", [written, assigned, in_shared_memory])
def test_a_weight_that_is_kept_is_packed_anew_when_it_has_changed(change, options):
    layer = nn.Linear(24, 40).eval()
    model = packed(nn.Sequential(layer).eval(), keep_original=True, **options)
    change(model[0].weight)
    x = torch.randn(5, 24)
    with torch.no_grad():
        found = model(x)
        assert lade.unpack(model)[0] is layer
        assert torch.equal(found, packed(nn.Sequential(layer).eval(), **options)(x))


def test_a_tied_head_follows_its_embedding():
    model = packed(build("gpt2"))
    dense = copy.deepcopy(model)
    for each in (model, dense):
        written(each.get_input_embeddings().weight)
    assert torch.equal(logits(model), logits(packed(lade.unpack(dense))))


@pytest.mark.parametrize(
    "new", [torch.zeros(40, 24).half(), torch.zeros(24, 40), torch.zeros(40, 25)], ids=["float16", "turned", "wider"]
)
def test_a_weight_that_is_kept_and_becomes_another_kind_is_refused(new):
    model = packed(nn.Sequential(nn.Linear(24, 40)).eval(), keep_original=True)
    model[0].weight.data = new
    with torch.no_grad():
        refused(lambda: model(torch.randn(5, 24)), "the weight of a packed layer was replaced", "lade.unpack(model)")


def test_the_same_layer_at_two_places_stays_the_same_layer():
    layer = nn.Linear(8, 8, bias=False)
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)}).eval()
    packed(model)
    assert model["a"] is model["b"][0] and packed_layers(model) == 1
    lade.unpack(model)
    assert model["a"] is model["b"][0] is layer


def test_small_layers_are_left_alone_and_so_is_a_model_without_larger_ones():
    model = build("llama")
    parts = list(model.modules())
    assert lade.pack(model) is model and list(model.modules()) == parts
    lade.pack(model, min_weights=VOCABULARY * 32)
    assert {type(module) for module in (model.lm_head, model.model.layers[0].mlp.down_proj)} == {PackedLinear}
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert packed_layers(model) == 7


def test_twice_is_once():
    model = packed(build("llama"))
    parts = {module for module in model.modules() if isinstance(module, PackedLinear)}
    packed(model)
    assert {module for module in model.modules() if isinstance(module, PackedLinear)} == parts
    lade.unpack(lade.unpack(model))
    assert not packed_layers(model)


@pytest.mark.parametrize("second", [packed, lade.unpack])
def test_a_second_thread_waits_until_the_first_has_packed(second, monkeypatch):
    model, put, others = build("llama"), packing._put, []
    expected, weights = logits(model), copy.deepcopy(model.state_dict())

    def interrupted(*args):
        if not others:
            others.append(threading.Thread(target=second, args=[model]))
            others[0].start()
            others[0].join(0.2)
        put(*args)

    monkeypatch.setattr(packing, "_put", interrupted)
    packed(model)
    others[0].join(10)
    assert packed_layers(model) == (len(linears(build("llama"))) if second is packed else 0)
    torch.testing.assert_close(logits(model), expected)
    for name, weight in lade.unpack(model).state_dict().items():
        assert torch.equal(weight, weights[name])


def test_what_a_model_says_of_itself_stays():
    model = build("llama")
    before = model.dtype, model.device, model.num_parameters(), model.num_parameters(only_trainable=True)
    packed(model)
    assert before == (model.dtype, model.device, model.num_parameters(), model.num_parameters(only_trainable=True))


# Saving and copying


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_packed_model_saves_dense_weights(family, keep, tmp_path):
    model = build(family)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    packed(model, keep_original=keep)
    found = model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    other = build(family)
    nn.init.zeros_(other.lm_head.weight)
    other.load_state_dict(found)
    assert torch.equal(other.lm_head.weight, expected["lm_head.weight"])
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_packed_too(family, keep, copied):
    model = build(family)
    dense = copy.deepcopy(model)
    other = copied(packed(model, keep_original=keep))
    assert packed_layers(other) == packed_layers(model) > 0
    assert torch.equal(logits(other), logits(model))
    lade.unpack(other)
    assert all(torch.equal(*pair) for pair in zip(other.parameters(), dense.parameters(), strict=True))
    tied = family == "gpt2"
    assert (other.lm_head.weight is other.get_input_embeddings().weight) == tied
    assert packed_layers(model), "the copy was unpacked, not this one"


@pytest.mark.parametrize("keep", [False, True])
def test_weights_cannot_be_moved_cast_or_replaced_and_nothing_has_changed_then(keep):
    model = packed(build("llama"), keep_original=keep)
    expected = logits(model)
    refused(model.half, "float32", "float16", "lade.unpack(model)")
    refused(lambda: model.to(torch.bfloat16), "bfloat16")
    refused(model.double, "float64")
    refused(lambda: model.to("meta"), "meta")
    refused(model.lm_head.half, "float16")
    refused(lambda: model.load_state_dict(model.state_dict()), "cannot be replaced", "lade.unpack(model)")
    refused(lambda: setattr(model.lm_head, "weight", nn.Parameter(torch.zeros(48, 32))), "cannot be replaced")
    if not keep:
        refused(lambda: setattr(model.lm_head.weight, "data", torch.zeros(48, 32)), "replaced", "lade.unpack(model)")
        refused(lambda: model.lm_head.weight.to("meta"), "cannot become float32 on meta", "lade.unpack(model)")
        assert torch.equal(model.lm_head.weight.to("cpu").to_dense(), model.lm_head.weight.data.to_dense())
    with pytest.raises(RuntimeError, match=r"weight is packed; call lade\.unpack"):
        model.lm_head.load_state_dict(model.lm_head.state_dict())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(logits(model.to("cpu").float().cpu().to(torch.float32)), expected)


@pytest.mark.slow
@torch.no_grad()
def test_a_packed_model_cannot_be_compiled():
    model = packed(build("llama"))
    refused(lambda: torch.compile(model, backend="eager")(PROMPT), "cannot be compiled", "lade.unpack(model)")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_embeddings_of_a_packed_model_are_not_resized_half_way(family):
    """Transformers replaces the embeddings before it comes to the head, which is a packed one."""
    model = packed(build(family))
    embedding, expected = model.get_input_embeddings(), logits(model)
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        refused(lambda other=other: other.resize_token_embeddings(VOCABULARY + 2), "be resized", "lade.unpack(model)")
    assert model.get_input_embeddings() is embedding and torch.equal(logits(model), expected)
    lade.unpack(model).resize_token_embeddings(VOCABULARY + 2, mean_resizing=False)
    assert logits(packed(model)).shape[-1] == VOCABULARY + 2


@pytest.mark.parametrize("kind", [peft.LoraConfig, peft.IA3Config])
def test_an_adapter_does_not_take_a_packed_layer_for_a_linear_one(kind):
    more = {"feedforward_modules": []} if kind is peft.IA3Config else {}
    with pytest.raises(ValueError, match=r"PackedLinear\(.*lade\.unpack\(model\)"):
        peft.get_peft_model(packed(build("llama")), kind(target_modules=["q_proj"], **more))


def test_a_model_inside_a_wrapper_is_guarded_as_well():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    wrapper = packed(peft.get_peft_model(build("llama"), config).eval())
    before = {name: weight.dtype for name, weight in wrapper.base_model.named_parameters()}
    refused(wrapper.half, "float16", "lade.unpack(model)")
    assert {name: weight.dtype for name, weight in wrapper.base_model.named_parameters()} == before
    refused(lambda: wrapper.base_model.resize_token_embeddings(VOCABULARY + 2), "be resized")
    lade.unpack(wrapper)
    assert not any("guard" in name for name, _ in wrapper.named_modules())


def offload(model, folder):
    """To a folder, or on this machine if there is none."""
    if folder is None:
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("options", [{}, {"weights": "int8"}], ids=["float32", "int8"])
@pytest.mark.parametrize("disk", [False, True])
def test_a_packed_model_is_not_offloaded(disk, options, tmp_path):
    model = packed(build("llama"), **options)
    expected = logits(model)
    refused(lambda: offload(model, tmp_path if disk else None), "cannot become", "on meta", "lade.unpack(model)")
    assert torch.equal(logits(model), expected), "what was offloaded before comes back"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("disk", [False, True])
def test_a_packed_model_that_keeps_its_weights_computes_with_what_is_offloaded_or_raises(family, disk, tmp_path):
    model, dense = packed(build(family), keep_original=True), build(family)
    expected = logits(model)
    offload(model, tmp_path if disk else None)
    if disk:
        refused(lambda: logits(model), "as offloading", "lade.unpack(model)")
    else:
        assert torch.equal(logits(model), expected)
    refused(lambda: lade.unpack(model), "has hooks", "remove_hook_from_submodules")
    accelerate.hooks.remove_hook_from_submodules(model)
    if not disk:
        assert torch.equal(logits(lade.unpack(model)), logits(dense))


# Refusals


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Quantised(torch.Tensor):
    pass


def of(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), layer).eval()


def with_hook(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda *_: None)
    return layer


def with_own_forward(layer: nn.Module) -> nn.Module:
    layer.forward = lambda x: x
    return layer


def of_a_tensor_subclass() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(torch.randn(8, 8).as_subclass(Quantised))
    return layer


def adapted() -> nn.Module:
    return peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"])).eval()


def offloaded() -> nn.Module:
    return accelerate.cpu_offload(build("llama"), execution_device=torch.device("cpu"))


def quantised() -> nn.Module:
    model = build("llama")
    model.hf_quantizer = object()
    return model


REFUSALS = {
    "subclass": (lambda: of(Scaled(8, 8)), "'1' is a Scaled"),
    "hook": (lambda: of(with_hook(nn.Linear(8, 8))), "'1' has hooks"),
    "forward": (lambda: of(with_own_forward(nn.Linear(8, 8))), "'1' has hooks"),
    "tensor subclass": (lambda: of(of_a_tensor_subclass()), "the weight of layer '1' is a Quantised"),
    "float64": (lambda: of(nn.Linear(8, 8).double()), "'1' is in float64"),
    "meta": (lambda: of(nn.Linear(8, 8, device="meta")), "'1' is on meta"),
    "offloaded": (offloaded, "has hooks, for example of accelerate"),
    "adapter": (adapted, "q_proj' has an adapter"),
    "quantiser": (quantised, "LlamaForCausalLM is quantised"),
    "training": (lambda: build("llama").train(), "training mode"),
    "compiled": (lambda: torch.compile(build("llama")), "compiled"),
    "a layer": (lambda: nn.Linear(8, 8).eval(), "Linear is a layer"),
    "no layers": (lambda: nn.Sequential(nn.Embedding(8, 8)).eval(), "no linear layers"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_understood_is_refused_and_left_as_it_was(name):
    make, message = REFUSALS[name]
    model = make()
    parts = list(model.modules())
    refused(lambda: packed(model), message, "; ")
    refused(lambda: packable(model, min_weights=1), message)
    assert list(model.modules()) == parts
    assert all(module._parameters["weight"] is not None for module in linears(model))


def test_a_small_layer_is_not_looked_at():
    model = nn.Sequential(Scaled(4, 4), nn.Linear(8, 8)).eval()
    assert packed_layers(lade.pack(model, min_weights=64)) == 1


@pytest.mark.parametrize("switch", ["is_available", "enabled"])
def test_a_pytorch_without_the_kernels_is_refused(monkeypatch, switch):
    model = build("llama")
    monkeypatch.setattr(torch.backends.mkldnn, switch, (lambda: False) if switch == "is_available" else False)
    refused(lambda: packed(model), "no packed float32 kernel", "not available or not enabled", "bfloat16")


def test_operators_that_have_gone_or_changed_are_refused(monkeypatch):
    class Gone:
        def __getattr__(self, name):
            raise AttributeError(f"no {name}\nbut more lines")

    model = build("llama")
    monkeypatch.setattr(torch.ops, "mkldnn", Gone())
    refused(lambda: packed(model), "no packed float32 kernel here (no _reorder_linear_weight);")

    class Wrong(Gone):
        _reorder_linear_weight = staticmethod(lambda weight: weight.to_mkldnn())
        _linear_pointwise = staticmethod(lambda x, *rest: 1.001 * x)

    monkeypatch.setattr(torch.ops, "mkldnn", Wrong())
    refused(lambda: packed(model), "packed float32 kernel is wrong here")
    assert not packed_layers(model)


def test_float16_is_packed_or_refused_as_the_processor_has_it():
    model = of(nn.Linear(8, 8)).half()
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        assert packed_layers(packed(model)) == 2
    else:
        refused(lambda: packed(model), "no packed float16 kernel here")


@pytest.mark.parametrize("problem", [KeyboardInterrupt, MemoryError])
def test_what_interrupts_packing_leaves_the_model_as_it_was(monkeypatch, problem):
    model = build("gpt2")
    expected, parts = copy.deepcopy(model), list(model.modules())
    failing(monkeypatch, PackedLinear, "_pack_weight", problem, calls={4})
    with pytest.raises(problem):
        packed(model)
    assert list(model.modules()) == parts
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))


def test_a_weight_that_does_not_come_back_is_not_given_up(monkeypatch):
    model = build("llama")
    weight = model.lm_head.weight
    monkeypatch.setattr(PackedLinear, "_dense", lambda self, packed, panel: packed.to_dense() + 1)
    refused(lambda: packed(model), "does not unpack to the original")
    assert model.lm_head.weight is weight and not packed_layers(model)


def test_what_is_no_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="str is not a model; give a transformers model"):
        lade.pack("Qwen/Qwen3-0.6B")
