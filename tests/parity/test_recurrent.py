"""Recurrent and hybrid families: plain decoding's tokens, and its logits at every node."""

from __future__ import annotations

import itertools
import sys
import warnings
from typing import Any

import pytest
import torch
from comparing import (
    CONFIGS,
    PAPER,
    assert_requests,
    assert_same,
    batch,
    lookahead,
    only_fallback,
    plain,
    prompt,
    streamed,
)
from effort import now_and_then
from families import RECURRENT_FAMILIES, family
from inside import capacity_of
from test_batch_families import LENGTHS, assert_same_batch
from torch.nn import functional
from transformers import DynamicCache, LogitsProcessor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import lade
from lade.backends.recurrent.backend import CORES, NodeStates, delta_rule, mamba2, selective_scan
from lade.backends.recurrent.layer import LinearFolding, RecurrentLayer, TreePass, convolution
from lade.backends.trials.tree_check import worst_error
from lade.model import facts, supports
from lade.model.facts import ModelFacts
from lade.model.runner import runner_for
from lade.serving.capacity import Need
from lade.tuning.cost_cache import measure_step_cost

CASES = [pytest.param(case, id=str(case)) for case in RECURRENT_FAMILIES if case.model_type in CONFIG_MAPPING]


@pytest.mark.one_in(32)
@pytest.mark.parametrize("case", CASES)
def test_it_writes_what_plain_decoding_writes(case, watch):
    model = case.build()
    assert lade.supports(model)
    stats = assert_same(model, prompt(20), CONFIGS[:3], max_new_tokens=60)
    assert stats.tokens_per_step > 1, "no guess was ever accepted"
    assert watch.branched and watch.moved, "the trees were chains: nothing was put to the test"


@pytest.mark.one_in(10)
@pytest.mark.parametrize("case", CASES)
def test_the_logits_at_every_node_are_those_of_plain_passes(case):
    model = case.build(seed=2)
    assert worst_error(model, lade.supports(model).require()) < 1e-3  # transformers' functions compute in float32


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", ["qwen3_5_text", "kimi_linear", "falcon_h1", "lfm2", "mamba2", "falcon_mamba"])
def test_batches_greedy_and_sampled(name):
    model = family(name).build()
    first = plain(model, **batch(*LENGTHS), max_new_tokens=30)[:, 20:]
    eos = [int(first[1, 5]), int(first[3, 15])]
    assert_same_batch(model, CONFIGS[:2], max_new_tokens=30, eos_token_id=eos)
    assert_same_batch(model, CONFIGS[:1], max_new_tokens=20, do_sample=True, temperature=0.6)


PIECES = {
    "nemotron_h": {"time_step_min": 1.0},  # this limits dt in the function for several tokens, and not in that for one
    "zamba2": {"time_step_min": 1.0},
    "bamba": {"time_step_limit": (1.0, float("inf"))},
    "jamba": {},  # its function for several tokens begins with an empty state
    "qwen3_next": {},
}
LIMITED_MAMBA_2 = {"time_step_limit": (1.0, float("inf"))}


def limits_tell_pieces_apart(model: Any, ids: torch.Tensor) -> bool:
    """Whether feeding the last token by itself changes the text."""
    chunked = plain(model, ids, prefill_chunk_size=ids.shape[1] - 1, max_new_tokens=30)
    return not torch.equal(chunked, plain(model, ids, max_new_tokens=30))


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", [*PIECES, "mamba2"])
@pytest.mark.parametrize("prefill_tokens", [5, 1])
def test_prompts_that_an_engine_feeds_in_pieces(name, prefill_tokens):
    model, lengths = family(name).build(**PIECES.get(name, LIMITED_MAMBA_2)), (6, 11, 1, 2, 16)
    assert name not in ("nemotron_h", "zamba2") or limits_tell_pieces_apart(model, prompt(6))
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    asked = [{"input_ids": ids, "max_new_tokens": 15, "pad_token_id": 0} for ids in prompts]
    assert_requests(model, asked, max_rows=3, prefill_tokens=prefill_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECES)
def test_short_prompts_and_prompts_in_chunks(name):
    model = family(name).build(**PIECES[name])
    for length in (1, 2, 3):
        assert_same(model, prompt(length), CONFIGS[:2], max_new_tokens=30)
    for length, chunk in ((6, 5), (7, 5), (20, 1), (20, 7)):
        assert_same(model, prompt(length), max_new_tokens=30, prefill_chunk_size=chunk)
    assert_same_batch(model, CONFIGS[:1], max_new_tokens=30)


@pytest.mark.slow
@pytest.mark.parametrize("name", PIECES)
def test_a_cache_goes_on_as_transformers_own_does(name):
    model = family(name).build(**PIECES[name])
    for more in (1, 2, 5):
        ours, theirs = lade.TreeCache(), DynamicCache(config=model.config)
        text = lookahead(model, prompt(20), max_new_tokens=20, past_key_values=ours)
        assert torch.equal(plain(model, prompt(20), max_new_tokens=20, past_key_values=theirs), text)
        longer = torch.cat([text, prompt(more - 1, seed=more)], dim=1)  # the last token of the text was not fed
        goes_on = name != "jamba" or more == 1  # where transformers begins anew, and does not say so, all is fed
        expected = plain(model, longer, **({"past_key_values": theirs} if goes_on else {}))
        assert torch.equal(lookahead(model, longer, past_key_values=ours), expected)


def test_plain_decoding_begins_a_cache_under_its_other_name():
    model = family("mamba2").build()
    expected, cache = plain(model, prompt(20), max_new_tokens=9), lade.TreeCache()
    assert torch.equal(lookahead(model, prompt(20), None, max_new_tokens=9, cache_params=cache), expected)
    assert cache.recurrent
    arguments = {"lookahead": None, "max_new_tokens": 9, "cache_params": lade.TreeCache(), "past_key_values": None}
    assert torch.equal(streamed(model, prompt(20), **arguments), expected)


def test_a_cache_under_a_name_that_is_not_known_is_refused(monkeypatch):
    model = family("mamba2").build()
    monkeypatch.setattr(facts, "CACHE_NAMES", ("keys",))
    assert "its forward takes no cache under a known name" in lade.supports(model).reason


class Mixing(LogitsProcessor):
    """A row's scores depend on those of the row beside it, and on its text."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores + 0.1 * scores.roll(1, 0) - 0.1 * (input_ids.sum(1, keepdim=True) % 2)


@pytest.mark.one_in(24)
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "jamba", "mamba2", "nemotron_h", "qwen3_5_text"])
@pytest.mark.parametrize("sampled", [False, True])
def test_rows_that_are_shown_together(name, sampled):
    model, rows = family(name).build(**PIECES.get(name, {})), batch(9, 5, 12)
    arguments: dict[str, Any] = {**rows, "do_sample": sampled, "max_new_tokens": 40, "logits_processor": [Mixing()]}
    arguments |= {"eos_token_id": int(plain(model, **rows)[1, 20]), "pad_token_id": 0}
    arguments |= {"return_dict_in_generate": True, "output_scores": True}
    configs = [PAPER, lade.LookaheadConfig(budget=12), *([lade.LookaheadConfig()] if sampled else [])]
    stats = assert_same(model, configs=configs, tolerance={"rtol": 1e-3, "atol": 1e-3}, **arguments)
    assert stats.tokens_per_step > 1, "no guess was ever accepted"


def test_states_count_as_memory_of_their_rows():
    model = family("qwen3_5_text").build()
    cache = lade.TreeCache()
    lookahead(model, prompt(20), max_new_tokens=5, past_key_values=cache)
    states = 3 * (4 * 8 * 8 * 4 + 64 * 4 * 8)  # float32 [4, 8, 8], and float64 inputs of 64 channels
    assert cache.state_bytes == states
    with lade.Engine(model, max_rows=8, max_tokens=2000) as engine:
        capacity = capacity_of(engine)
        assert capacity.state_slots == -(-states // engine.token_bytes)
        need = Need(tokens=100, tree=20)
        rows = next(rows for rows in range(1, 99) if not capacity.fits([need] * (rows + 1)))
        assert rows == min(8, 2000 // (120 + capacity.state_slots))


def test_where_all_layers_are_recurrent_a_slot_is_a_byte_of_the_states():
    states = 4 * (8 * 8 * 8 * 4 + 96 * 4 * 8)  # float32 [8, 8, 8], and float64 inputs of 96 channels
    with lade.Engine(family("mamba2").build(), max_rows=8, max_tokens=3 * states) as engine:
        capacity, need = capacity_of(engine), Need(tokens=100, tree=20)
        assert (capacity.token_bytes, capacity.state_slots) == (1, states)
        assert capacity.fits([need] * 2) and not capacity.fits([need] * 3)


@pytest.mark.slow
def test_padding_that_reaches_a_convolution_is_refused():
    model = family("lfm2").build(conv_bias=True)
    assert_same(model, prompt(20), CONFIGS[:1])
    with pytest.raises(lade.UnsupportedArgumentError, match="left padding"):
        lookahead(model, **batch(20, 7), pad_token_id=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zamba2", "qwen3_5_text", "jamba", "lfm2", "mamba2"])
def test_training_mode(name):
    model = family(name).build(**PIECES.get(name, {})).train()
    assert_same(model, prompt(20), CONFIGS[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable()
        support = lade.supports(model)
        if support:  # mamba2, and from transformers 5.24 on all: the cache is kept where nothing is differentiated
            assert_same(model, prompt(20), CONFIGS[:1])
        else:
            assert "training mode" in support.reason


def test_what_recurrent_layers_cannot_do_is_refused():
    model, mamba = family("qwen3_5_text").build(), family("mamba2").build()
    paths = r"DynamicCache on a model with rec.*give a lade.TreeCa"
    everything = "a model whose layers are all recurrent"
    for refusing, said, arguments in (
        (model, "num_beams cannot be used .*recurrent layers", {"num_beams": 2}),
        (model, "prefill_chunk_size=5 with left padding", {"prefill_chunk_size": 5, "pad_token_id": 0, **batch(20, 7)}),
        (model, paths, {"past_key_values": DynamicCache(config=model.config)}),
        (model, paths, {"past_key_values": DynamicCache()}),
        (mamba, everything, {"cache_params": DynamicCache(config=mamba.config)}),
        (mamba, everything, {"cache_params": lade.TreeCache()}),
    ):
        with pytest.raises(lade.UnsupportedArgumentError, match=said):
            lookahead(refusing, **{"ids": prompt(20), **arguments})
    with (
        lade.Engine(model) as engine,
        pytest.raises(lade.UnsupportedArgumentError, match="prefill_chunk_size=5 cannot"),
    ):
        engine.add(prompt(20), prefill_chunk_size=5, max_new_tokens=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = lookahead(model, prompt(20), "auto", past_key_values=DynamicCache(config=model.config), max_new_tokens=9)
    assert "recurrent layers" in only_fallback(caught)
    assert torch.equal(ours, plain(model, prompt(20), max_new_tokens=9))


def test_an_empty_cache_that_nobody_has_begun_is_refused():
    model, cache = family("qwen3_5_text").build(), lade.TreeCache()
    with pytest.raises(lade.UnsupportedArgumentError, match=r"an empty lade\.TreeCache has no layers for the states"):
        plain(model, prompt(20), past_key_values=cache)
    text = lookahead(model, prompt(20), max_new_tokens=8, past_key_values=cache)
    again = plain(model, text, max_new_tokens=8, past_key_values=cache)
    assert torch.equal(again, plain(model, text, max_new_tokens=8))


def test_a_family_with_recurrent_layers_built_without_any():
    model = family("lfm2").build(layer_types=["full_attention"] * 4)
    assert not ModelFacts.of(model).recurrent
    assert_same(model, prompt(20), CONFIGS[:1], max_new_tokens=30)


def test_kernels_that_replace_layers_are_refused(monkeypatch):
    model = family("qwen3_5_text").build()
    monkeypatch.setattr(model, "_use_kernels", True, raising=False)
    with pytest.raises(lade.UnsupportedModelError, match="load it without use_kernels"):
        lookahead(model, prompt(20))


def test_passes_over_trees_leave_the_functions_of_transformers_in_place():
    model = family("qwen3_next").build()
    module = sys.modules[type(model).__module__]
    before = {name: getattr(module, name) for name in CORES if hasattr(module, name)}
    ids = prompt(20)
    with torch.no_grad():
        logits = model(ids).logits
        lookahead(model, ids, max_new_tokens=15)
        assert torch.equal(model(ids).logits, logits)
    assert before and all(getattr(module, name) is function for name, function in before.items())


def test_functions_that_mixers_do_not_call_are_noticed(monkeypatch):
    model = family("qwen3_next").build()
    monkeypatch.setattr(sys.modules[type(model).__module__], "mamba2_chunk_scan", print, raising=False)
    with pytest.raises(lade.UnsupportedModelError, match="do not call the functions that are patched"):
        lookahead(model, prompt(20))


@pytest.fixture
def unlisted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families with recurrent layers are checked, as if no test knew them."""
    monkeypatch.setattr(supports, "RECURRENT", frozenset())


@pytest.mark.one_in(70)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_families_that_no_test_knows_pass_the_check(case, backend, unlisted):
    model = case.build(backend if backend in case.backends else None, **PIECES.get(str(case), {}))
    assert lade.supports(model)
    assert_same(model, prompt(20), CONFIGS[:1], max_new_tokens=20)


def convolution_of_a_text(tree_pass: TreePass, original: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """As if the nodes were a text: each one's window shifted by one."""
    return convolution(tree_pass, original, inputs.roll(1, dims=-1), *args, **kwargs)


def scan_of_a_text(tree_pass: TreePass, original: Any, *args: Any, **kwargs: Any) -> Any:
    """As if the nodes were a text, which begins with an empty state."""
    return original(*args, **kwargs)[0], selective_scan(tree_pass, original, *args, **kwargs)[1]


def mamba_2_that_is_limited(tree_pass: TreePass, original: Any, inputs: Any, dt: Any, *args: Any, **kwargs: Any) -> Any:
    """With the limit of the function for several tokens, which decoding does not have."""
    limited = functional.softplus(dt + kwargs["dt_bias"]).clamp(min=kwargs["dt_limit"][0])
    return mamba2(tree_pass, original, inputs, limited, *args, **{**kwargs, "dt_bias": None, "dt_softplus": False})


def delta_rule_of_a_text(tree_pass: TreePass, original: Any, *args: Any, **kwargs: Any) -> Any:
    """As if the nodes were a text: the outputs of the original function."""
    return original(*args, **kwargs)[0], delta_rule(tree_pass, original, *args, **kwargs)[1]


def folded_too_early(self: LinearFolding, state: torch.Tensor, last: torch.Tensor) -> None:
    """The state after the node before the path's last one."""
    fold(self, state, last - 1)


def state_of_the_root(self: NodeStates, state: torch.Tensor, last: torch.Tensor) -> None:
    """The state after the root, whatever path was accepted."""
    state.copy_(self.states[:, 0])


def without_windows(self: RecurrentLayer, last: torch.Tensor) -> None:
    """Folds states, and leaves the inputs of convolutions as they are."""
    self.inputs.clear()
    keep(self, last)


fold, keep = LinearFolding.fold, RecurrentLayer.keep
WRONG: dict[str, tuple[str, Any, Any]] = {
    "convolution": ("qwen3_5_text", (CORES, "causal_conv1d_fn"), convolution_of_a_text),
    "delta rule": ("qwen3_5_text", (CORES, "torch_chunk_gated_delta_rule"), delta_rule_of_a_text),
    "convolution not wrapped": ("qwen3_5_text", (CORES, "causal_conv1d_fn"), None),
    "delta rule not wrapped": ("qwen3_5_text", (CORES, "torch_chunk_gated_delta_rule"), None),
    "folding": ("qwen3_5_text", (LinearFolding, "fold"), folded_too_early),
    "stale windows": ("qwen3_5_text", (RecurrentLayer, "keep"), without_windows),
    "Mamba 1": ("mamba", (CORES, "mamba_selective_scan"), scan_of_a_text),
    "Mamba 1 folding": ("falcon_mamba", (NodeStates, "fold"), state_of_the_root),
    "Mamba 1 not wrapped": ("mamba", (CORES, "mamba_selective_scan"), None),
    "Mamba 2 limit": ("mamba2", (CORES, "mamba2_chunk_scan"), mamba_2_that_is_limited),
    "Mamba 2 folding": ("mamba2", (LinearFolding, "fold"), folded_too_early),
    "Mamba 2 stale windows": ("mamba2", (RecurrentLayer, "keep"), without_windows),
}


@pytest.mark.one_in(10)
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_check_refuses_what_is_wrong(name, dtype, unlisted, monkeypatch):
    of, (owner, attribute), wrong = WRONG[name]
    model = family(of).build(**(LIMITED_MAMBA_2 if of == "mamba2" else {})).to(dtype)
    if wrong is None:
        monkeypatch.delitem(owner, attribute)
    elif isinstance(owner, dict):
        monkeypatch.setitem(owner, attribute, wrong)
    else:
        monkeypatch.setattr(owner, attribute, wrong)
    assert "a tree pass does not equal plain passes" in lade.supports(model).reason
    monkeypatch.undo()
    assert lade.supports(family(of).build().to(dtype))


@pytest.mark.slow
def test_a_failed_pass_leaves_a_cache_that_goes_on(monkeypatch):
    model, cache, ids = family("qwen3_5_text").build(), lade.TreeCache(), prompt(20)
    passes = itertools.count()

    def fail_later(*_: object) -> None:
        if next(passes) == 4:
            raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(fail_later)
    with pytest.raises(KeyboardInterrupt):
        lookahead(model, ids, past_key_values=cache)
    hook.remove()
    held = cache.get_seq_length()
    text = plain(model, ids)
    assert held == 0 or 20 <= held < text.shape[1]
    again = lookahead(model, text[:, : held + 1] if held else ids, past_key_values=cache)
    assert torch.equal(again[:, :60], text[:, :60])


@pytest.mark.parametrize("name", ["falcon_h1", *now_and_then("qwen3_5_text", "jamba")])
def test_plain_decoding_and_ours_take_turns_on_one_cache(name):
    model, cache, text = family(name).build(), lade.TreeCache(), prompt(20)
    for turn, config in enumerate((None, PAPER, None, "auto")):
        expected = plain(model, text, max_new_tokens=15)
        if turn == 2:  # a stream that is left in the middle of its passes
            given = {"max_new_tokens": 15, "lookahead": PAPER, "past_key_values": cache, "do_sample": False}
            stream = lade.stream(model, text, **given)
            list(itertools.islice(stream, 2))
            stream.close()
            cache.crop(text.shape[1] - 1 - cache.get_seq_length())
        result = lookahead(model, text, config, max_new_tokens=15, past_key_values=cache)
        assert torch.equal(result, expected)
        text = torch.cat([result, prompt(3, seed=turn)], dim=1)
    again = streamed(model, text, max_new_tokens=9, lookahead=None, past_key_values=cache, do_sample=False)
    assert torch.equal(again, plain(model, text, max_new_tokens=9))


@pytest.mark.measured_cost
@pytest.mark.parametrize("name", ["qwen3_5_text", *now_and_then("jamba", "lfm2")])
def test_the_cost_of_passes_is_measured(name):
    model = family(name).build()
    runner = runner_for(ModelFacts.of(model), lade.supports(model).require(), model.generation_config)
    cost = measure_step_cost(runner, vocabulary=64, cached=40, budget_s=0.1)
    assert cost.seconds(8) > 0


@pytest.mark.slow
def test_a_memory_that_is_kept_and_a_prompt_read_twice():
    model, config = family("qwen3_5_text").build(), lade.LookaheadConfig(memory=lade.Memory(), budget=16)
    first, second = (assert_same(model, prompt(20), [config]).steps for _ in range(2))
    assert second < first


@pytest.mark.slow
def test_a_cropped_cache_forgets_everything():
    model, cache = family("lfm2").build(), lade.TreeCache()
    text = lookahead(model, prompt(20), max_new_tokens=30, past_key_values=cache)
    cache.crop(0)
    assert cache.get_seq_length() == text.shape[1] - 1
    cache.crop(-10)
    assert cache.get_seq_length() == 0
    assert torch.equal(lookahead(model, text[:, :35], past_key_values=cache), plain(model, text[:, :35]))
