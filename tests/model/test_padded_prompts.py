"""Prompts of several lengths: which go in one pass, and that each gets there what it gets alone."""

from itertools import chain, combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inside import hooks_of
from pretend import short_pieces, short_trials
from small_models import small_model
from transformers import DynamicCache, GenerationConfig, LlamaForCausalLM

import lade
from lade.backends.trials import tree_check
from lade.model import prefill, runner
from lade.model.facts import CACHE
from lade.model.kv_cache import TreeCache
from lade.model.prefill import grouped
from lade.model.runner import EagerRunner
from lade.testing import toy_model

LENGTHS = 9, 30, 17, 9, 30
CLOSE = {
    "rtol": 1e-4,
    "atol": 1e-4,
}  # norms and rotations are in float32; a token that sees padding is 0.1 off and more


def texts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 48, (length,), generator=generator).tolist() for length in lengths]


MODELS = {
    "llama": toy_model("llama"),
    "gpt2": toy_model("gpt2"),
    "qwen3": toy_model("qwen3", attention="eager"),
    "windows and a cap": small_model(
        "gemma2", torch.float64, "eager", head_dim=8, sliding_window=6, final_logit_softcapping=5.0
    ),
}


def runner_of(model, **arguments):
    return EagerRunner(model, lade.supports(model).require(), GenerationConfig(**arguments))


class Fed:
    """What a runner's prefill of these prompts returns, shows and leaves, and the shapes that its model was fed."""

    def __init__(self, runs, prompts):
        self.cache, self.shown, self.shapes = TreeCache(), [], []
        embeddings = runs.model.get_input_embeddings()
        watch = embeddings.register_forward_pre_hook(lambda module, args: self.shapes.append(tuple(args[0].shape)))
        self.logits = runs.prefill(prompts, self.cache, lambda *shown: self.shown.append(shown))
        watch.remove()


def alone(monkeypatch):
    """Have prompts of each length go in a pass of their own."""
    monkeypatch.setattr(runner, "PASS_TOKENS", dict.fromkeys(prefill.PASS_TOKENS, 0))


def assert_same(one, other):
    torch.testing.assert_close(one.logits, other.logits, **CLOSE)
    assert one.cache.lengths == other.cache.lengths
    for layer, expected in zip(one.cache.layers, other.cache.layers, strict=True):
        for row, length in enumerate(one.cache.lengths):
            for name in ("keys", "values"):
                states, wanted = (getattr(each, name)[row, :, :length] for each in (layer, expected))
                torch.testing.assert_close(states, wanted, **CLOSE)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("repeated", [False, True])
def test_they_get_what_they_get_alone(family, repeated, monkeypatch):
    """What is shown of them comes in the same calls, too, the last tokens of longer ones in pieces."""
    short_pieces(monkeypatch, tokens=20, logits=48 * 16)
    prompts, runs = texts(*LENGTHS), runner_of(MODELS[family])
    prompts += prompts[:1] * repeated
    together = Fed(runs, prompts)
    alone(monkeypatch)
    apart = Fed(runs, prompts)
    assert together.shapes == [(5, 30)] and apart.shapes == [(2, 9), (1, 17), (2, 30)]
    assert_same(together, apart)
    assert [shown[:2] for shown in together.shown] == [shown[:2] for shown in apart.shown]
    for (_, _, logits), (*_, expected) in zip(together.shown, apart.shown, strict=True):
        torch.testing.assert_close(logits, expected, **CLOSE)


def test_the_head_runs_on_last_tokens_alone():
    model, seen = MODELS["llama"], []
    watch = model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(tuple(args[0].shape)))
    runner_of(model).prefill(texts(*LENGTHS), TreeCache())
    watch.remove()
    assert seen == [(5, 1, 32)] and not hooks_of(model)


def test_those_that_would_take_more_padding_than_a_pass_costs_go_apart():
    fed = Fed(runner_of(MODELS["llama"]), texts(10, 100, 12, 90))
    assert fed.shapes == [(2, 12), (2, 100)]


@pytest.mark.parametrize("what", ["chunks", "frequencies"])
def test_where_padding_is_not_exact_they_go_apart(what, monkeypatch):
    model = toy_model("llama")
    if what == "chunks":
        runs = runner_of(model, prefill_chunk_size=64)
    else:
        model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
        model.config.max_position_embeddings = 29
        runs = runner_of(model)
    assert Fed(runs, texts(*LENGTHS)).shapes == [(2, 9), (1, 17), (2, 30)]
    assert runs.pads == (what == "frequencies")


def test_an_error_leaves_an_empty_cache():
    cache, prompts = TreeCache(), [[1, 2, 3], [4, 1000]]
    with pytest.raises(IndexError):
        runner_of(MODELS["llama"]).prefill(prompts, cache)
    assert not cache.layers and not hooks_of(MODELS["llama"])


@pytest.mark.by_processor
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_invariant_model_gives_the_same_bits(dtype, monkeypatch):
    short_trials(monkeypatch)
    model = lade.invariant(toy_model(dtype=dtype))
    prompts, runs = texts(*LENGTHS), runner_of(model)
    together = Fed(runs, prompts)
    assert together.shapes == [(5, 30)]
    for prompt, logits in zip(prompts, together.logits, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            expected = model(ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1).logits[0, -1]
        assert torch.equal(logits, expected)


class LooksBothWays(LlamaForCausalLM):
    """Its first pass mixes all of the prompt into each token; what comes after looks back alone."""

    def forward(self, input_ids=None, **arguments):
        states, cache = self.get_input_embeddings()(input_ids), arguments.get(CACHE)
        if cache is None or not cache.get_seq_length():
            states = states + states.mean(1, keepdim=True)
        return super().forward(inputs_embeds=states, **arguments)


class Own(LlamaForCausalLM):
    """Someone's own class that does what it should."""


@pytest.mark.parametrize("kind", [LooksBothWays, Own])
def test_a_model_that_no_test_vouches_for_is_tried(kind):
    toy = MODELS["llama"]
    model = kind(toy.config).double().eval()
    model.load_state_dict(toy.state_dict())
    runs, prompts = runner_of(model), texts(*LENGTHS)
    assert runs.pads == (kind is Own)
    logits = runs.prefill(prompts, TreeCache())
    expected = torch.stack([runs.prefill([prompt], TreeCache())[0] for prompt in prompts])
    torch.testing.assert_close(logits, expected, **CLOSE)


def test_a_model_that_fails_on_padded_prompts_is_fed_them_apart(monkeypatch):
    def fail(*arguments, **named):
        raise RuntimeError("no such shape")

    model = Own(MODELS["llama"].config).double().eval()
    monkeypatch.setattr(TreeCache, "trim", fail)
    assert not tree_check.can_be_padded(model, lade.supports(MODELS["llama"]).require())


def cost(groups, prompts, pass_tokens):
    return sum(pass_tokens + max(group) * sum(prompts[length] for length in group) for group in groups)


def all_groups(lengths):
    """Every way to cut ascending lengths into groups."""
    places = range(1, len(lengths))
    for cuts in chain.from_iterable(combinations(places, count) for count in range(len(lengths))):
        ends = [0, *cuts, len(lengths)]
        yield [set(lengths[first:end]) for first, end in pairwise(ends)]


@given(
    prompts=st.dictionaries(st.integers(1, 60), st.integers(1, 4), min_size=1, max_size=7),
    pass_tokens=st.integers(0, 80),
)
def test_no_groups_cost_less(prompts, pass_tokens):
    lengths = sorted(prompts)
    groups = grouped(prompts, pass_tokens)
    assert sorted(chain.from_iterable(groups)) == lengths
    least = min(cost(each, prompts, pass_tokens) for each in all_groups(lengths))
    assert cost(groups, prompts, pass_tokens) == least


@pytest.mark.parametrize(
    ("prompts", "groups"),
    [
        ({7: 3}, [{7}]),
        ({7: 1, 13: 1, 20: 2}, [{7, 13, 20}]),
        ({10: 1, 400: 1}, [{10}, {400}]),
        ({10: 1, 12: 1, 390: 2, 400: 1}, [{10, 12}, {390, 400}]),
    ],
)
def test_padding_never_costs_more_than_a_pass_of_its_own(prompts, groups):
    assert grouped(prompts, 48) == groups
