"""MTP layers of every family whose checkpoints have some: read, and run as transformers itself would run them."""

from types import SimpleNamespace

import pytest
import torch
from families import _DELTA_RULE, _EXPERTS, _GROUPED, _KIMI, _LATENT, _SHARED_EXPERT, _WINDOWED, Family
from mtp_toys import load, write_checkpoint
from transformers.cache_utils import MtpCache

import lade
from lade import LookaheadConfig, Stats
from lade.backends.mtp.load import layer_of
from lade.backends.mtp.runner import MtpRunner

_ONE_MORE = {"num_hidden_layers": 5}
_HYBRID = {"layer_types": ["linear_attention"] * 3 + ["full_attention"] * 2}
CASES = {
    "llama": (Family("llama", {**_GROUPED, **_ONE_MORE}), {}),
    "deepseek_v3": (Family("deepseek_v3", {"num_key_value_heads": 4, **_LATENT, **_ONE_MORE}), {"prefix": None}),
    "glm4_moe": (
        Family(
            "glm4_moe",
            {
                **_GROUPED,
                **_EXPERTS,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                **_ONE_MORE,
            },
        ),
        {"prefix": None},
    ),
    "mellum": (
        Family(
            "mellum",
            {
                **_GROUPED,
                **_EXPERTS,
                **_WINDOWED,
                "num_experts": 4,
                **_ONE_MORE,
                "layer_types": ["full_attention"] * 4 + ["sliding_attention"],
            },
        ),
        {},
    ),
    "bailing_hybrid": (
        Family("bailing_hybrid", {**_KIMI, **_ONE_MORE, **_HYBRID, "mlp_layer_types": ["dense"] + ["sparse"] * 4}),
        {"prefix": None},
    ),
    "mimo_v2_flash": (
        Family(
            "mimo_v2_flash",
            {
                **_GROUPED,
                **_EXPERTS,
                **_WINDOWED,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                **_ONE_MORE,
                "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
            },
            ("eager",),
        ),
        {"prefix": "model.mtp", "count": None},
    ),
    "qwen3_5_text": (
        Family("qwen3_5_text", {**_DELTA_RULE, **_ONE_MORE, **_HYBRID}),
        {"count": "mtp_num_hidden_layers"},
    ),
    "qwen3_next": (
        Family(
            "qwen3_next",
            {**_DELTA_RULE, **_SHARED_EXPERT, "decoder_sparse_step": 1, "mlp_only_layers": [], **_ONE_MORE, **_HYBRID},
        ),
        {"count": None},
    ),
}


@pytest.fixture(params=sorted(CASES))
def made(request, tmp_path):
    family, layout = CASES[request.param]
    larger = family.build()
    named = write_checkpoint(larger, tmp_path, **layout)
    chosen = {"attn_implementation": family.backends[0]}
    if hasattr(larger.config, "num_experts_per_tok"):
        chosen["experts_implementation"] = "eager"
    model = load(tmp_path, family.dtype, **chosen)
    return SimpleNamespace(model=model, named=named)


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
    row = SimpleNamespaceRow(ids[0].tolist())
    runner = MtpRunner(model, loaded, "past_key_values", gathers=False)
    with torch.no_grad(), runner.reading([row]):
        model(input_ids=ids[:, :-1])
    assert runner.knows(row)
    ours = runner.predict([row], [()])
    assert ours.tokens[0, 0] == int(theirs)
    chances = logits[0, -1].float().softmax(-1)
    expected = chances[torch.from_numpy(ours.tokens[0].astype("int64"))].logit().clamp(-13.9, 9.0)
    torch.testing.assert_close(torch.from_numpy(ours.odds[0]).float(), expected, atol=1e-3, rtol=1e-3)


class SimpleNamespaceRow:
    """A row as a layer knows it."""

    def __init__(self, tokens):
        self.tokens = tokens


@pytest.mark.parametrize("arguments", [{}, {"do_sample": True, "temperature": 0.5}], ids=["greedy", "sampled"])
def test_texts_are_plains(made, arguments):
    ids, stats = text(12), Stats()
    torch.manual_seed(4)
    expected = made.model.generate(ids, max_new_tokens=40, **arguments)
    torch.manual_seed(4)
    config = LookaheadConfig(budget=12, mtp=True)
    assert torch.equal(
        lade.generate(made.model, ids, max_new_tokens=40, lookahead=config, stats=stats, **arguments), expected
    )
    assert lade.supports(made.model).mtp
