"""MTP layers of every family whose checkpoints have some: read, and run as transformers itself would run them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from comparing import assert_requests, assert_same
from families import _EXPERTS, _GROUPED, _SIZES, _WINDOWED, Family, family, randomize
from mtp_toys import Text, heard, load, write_checkpoint
from multimodal import _VISION, OTHERS, Multimodal
from transformers import AutoModelForImageTextToText
from transformers.cache_utils import MtpCache

import lade
from lade import LookaheadConfig, UnsupportedArgumentError
from lade.backends.mtp.backend import MtpRunner
from lade.backends.mtp.load import layer_of
from lade.model.runner import EagerRunner

_ONE_MORE = {"num_hidden_layers": 5}
_HYBRID = {"layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2}
_GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_OF_TWO_KINDS = ["sliding_attention", "full_attention"] * 2 + ["full_attention"]


def longer(name, **fields):
    """A family that is listed, with one layer more."""
    case = family(name)
    return replace(case, extra={**case.extra, **_ONE_MORE, **fields})


CASES = {
    "llama": (longer("llama"), {}),
    "deepseek_v3": (longer("deepseek_v3"), {"prefix": None}),
    "glm4_moe": (
        Family("glm4_moe", {**_GROUPED, **_EXPERTS, **_GROUPS, "first_k_dense_replace": 1, **_ONE_MORE}),
        {"prefix": None},
    ),
    "mellum": (
        Family("mellum", {**_GROUPED, **_EXPERTS, **_WINDOWED, "num_experts": 4, **_ONE_MORE,
            "layer_types": ["full_attention"] * 4 + ["sliding_attention"]}),
        {},
    ),
    "bailing_hybrid": (
        longer("bailing_hybrid", **_HYBRID, mlp_layer_types=["dense"] + ["sparse"] * 4), {"prefix": None},
    ),
    "mimo_v2_flash": (
        Family("mimo_v2_flash", {**_GROUPED, **_EXPERTS, **_WINDOWED, **_GROUPS, **_ONE_MORE,
            "layer_types": _OF_TWO_KINDS}, ("eager",)),
        {"prefix": "model.mtp", "count": None},
    ),
    "qwen3_5_text": (longer("qwen3_5_text", **_HYBRID), {"count": "mtp_num_hidden_layers"}),
    "qwen3_next": (longer("qwen3_next", **_HYBRID), {"count": None}),
}  # fmt: skip
_STEP = {
    **_SIZES, **_GROUPED, **_EXPERTS, **_WINDOWED, **_ONE_MORE, "n_routed_experts": 4, "share_expert_dim": 16,
    "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 2 + ["dense"],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
    },
}  # fmt: skip
_QWEN = next(case for case in OTHERS if case.kind == "Qwen3_5")
WITH_IMAGES = {
    "qwen3_5": (replace(_QWEN, text={**_QWEN.text, **_ONE_MORE, **_HYBRID}), {"count": "mtp_num_hidden_layers"}),
    "step3p7": (
        Multimodal("Step3p7", _STEP, {**_VISION, "num_hidden_layers": 1}),
        {"prefix": None, "count": "num_nextn_predict_layers"},
    ),
}


@pytest.fixture(params=sorted(CASES | WITH_IMAGES), scope="module")
def made(request, tmp_path_factory):
    case, layout = (CASES | WITH_IMAGES)[request.param]
    larger, folder = case.build(), tmp_path_factory.mktemp("mtp")
    named = write_checkpoint(larger, folder, **layout)
    chosen = {} if request.param in WITH_IMAGES else {"attn_implementation": case.backends[0]}
    if hasattr(larger.config.get_text_config(), "num_experts_per_tok"):
        chosen["experts_implementation"] = "eager"
    loader = AutoModelForImageTextToText if request.param in WITH_IMAGES else transformers.AutoModelForCausalLM
    return SimpleNamespace(model=load(folder, case.dtype, loader=loader, **chosen), named=named)


def text(length, seed=1):
    return torch.randint(1, 60, (1, length), generator=torch.Generator().manual_seed(seed))


def test_the_weights_arrive(made):
    before = {name: weight.clone() for name, weight in made.model.state_dict().items()}
    loaded = layer_of(made.model)
    assert not isinstance(loaded, str), loaded
    own = dict(loaded.mtp.layers[0].named_parameters())
    same = [name for name in made.named if name in own]
    assert len(same) > 4
    for name in same:
        assert torch.equal(own[name], made.named[name]), name
    assert all(torch.equal(weight, before[name]) for name, weight in made.model.state_dict().items())
    assert all(weight.requires_grad for weight in made.model.parameters()), "the model's own were frozen"


def test_the_first_draft_is_transformers_own(made):
    """And the second one, by the same layer on its own output, is that of one more pass over the text."""
    model, loaded = made.model, layer_of(made.model)
    ids = text(20)
    with torch.no_grad():
        states = model.get_decoder()(ids[:, :-1]).last_hidden_state
        cache = MtpCache(config=loaded.mtp.config)
        places = torch.arange(1, 20)[None]
        theirs, logits, _ = loaded.mtp(ids[:, 1:], states, None, places, cache)
    row = Text(ids[0].tolist())
    passes = EagerRunner(model, lade.supports(model).plan, model.generation_config)
    runner = MtpRunner(passes, loaded, gathers=False)
    with torch.no_grad(), runner.reading([row]):
        model(input_ids=ids[:, :-1])
    assert runner.knows(row)
    ours = runner.predict([row], None)
    assert ours.tokens[0, 0] == int(theirs)
    chances = logits[0, -1].float().softmax(-1)
    expected = chances[torch.from_numpy(ours.tokens[0].astype("int64"))].logit().clamp(-13.9, 9.0)
    torch.testing.assert_close(torch.from_numpy(ours.odds[0]).float(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "temperature": 0.5}], ids=["greedy", "sampled"])
def test_texts_are_plains(made, arguments):
    layer_of(made.model).habits.clear()
    assert_same(made.model, text(12), [LookaheadConfig(budget=12, mtp=True)], max_new_tokens=16, **arguments)
    assert lade.supports(made.model).mtp
    assert heard(made.model), "no prediction was weighed"


def test_engines(made):
    """Rows join and leave; one of them is sampled."""
    asked = [
        {"input_ids": text(6 + 3 * number, number), "max_new_tokens": 10 + 3 * number, "do_sample": number == 1}
        for number in range(3)
    ]
    assert_requests(made.model, [{**each, "lookahead": LookaheadConfig(budget=8)} for each in asked])


def test_nemotron_h_drafts_without_its_blocks(tmp_path):
    kinds = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe", "full_attention"]
    case = family("nemotron_h")
    larger = case.build(num_hidden_layers=7, layers_block_type=kinds)
    write_checkpoint(larger, tmp_path, count="num_nextn_predict_layers")
    model = load(tmp_path, case.dtype, experts_implementation="eager")
    assert "MTP layers of several blocks (full_attention, moe)" in lade.supports(model).mtp.reason
    ids = text(12)
    ours = lade.generate(model, ids, max_new_tokens=20, lookahead=LookaheadConfig(budget=8))
    assert torch.equal(ours, model.generate(ids, max_new_tokens=20))
    with pytest.raises(UnsupportedArgumentError, match="several blocks"):
        lade.generate(model, ids, max_new_tokens=20, lookahead=LookaheadConfig(mtp=True))


def test_inkling_layers_carry_a_state(tmp_path):
    """The model itself has attention that goes by cache slot, so it is refused, and its layer with it."""
    config = transformers.InklingTextConfig(
        **_SIZES, **_GROUPED, **_EXPERTS, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8,
        sliding_window_size=12, d_rel=4, rel_extent=64, n_routed_experts=4, n_shared_experts=1, num_mtp_layers=1,
        layer_types=["hybrid_sliding", "hybrid"] * 2, mlp_layer_types=["dense"] * 4,
    )  # fmt: skip
    larger = transformers.InklingForCausalLM._from_config(config, attn_implementation="eager")
    write_checkpoint(randomize(larger, 0).double().eval(), tmp_path, prefix="model.mtp")
    model = load(tmp_path)
    assert "has an MTP layer that carries a state (hybrid)" in layer_of(model)
    assert not lade.supports(model) and not lade.supports(model).mtp
