"""Passes that are captured and replayed write what `model.generate` writes.

Each test runs on the CPU, where a tape stands in for CUDA graphs, and, marked `gpu`, with real ones.
"""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from comparing import CONFIGS, PAPER, assert_same, assert_same_beams, lookahead, plain, prompt
from effort import now_and_then
from families import CONTEXT, DYNAMIC, FAMILIES, family, longrope
from graphed import Graphs, assert_same_parts, graphs_on, shapes_of
from inside import buffers_in
from mtp_toys import llama_with_mtp, load
from pretend import NO_CUDA, chosen_at_once, small_buffers
from spies import answered, failing, watched
from test_batch_families import batch, build
from transformers import GenerationConfig

import lade
from lade.backends.cuda_graphs import backend as choice
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.backends.cuda_graphs.buffers import Buffers, CudaCapture, EagerReplay
from lade.backends.cuda_graphs.pool import BufferPool, capture_setup, pool_of
from lade.backends.cuda_graphs.runner import GraphRunner
from lade.backends.cuda_graphs.static_cache import StaticCache
from lade.backends.tree_attention import backend as tree_attention
from lade.decoding import loop, readout
from lade.errors import CaptureWarning
from lade.model import runner as select_runner
from lade.model.facts import ModelFacts
from lade.model.runner import EagerRunner, runner_for

BUDGET = lade.LookaheadConfig(budget=24)
QUICK = "llama gemma3_text gpt2 bloom llama4_text"
"""Families that are tried each time; the others are `slow`."""
RECURRENT = ["lfm2", "mamba2", "falcon_h1"]
EXPERTS = (
    "mixtral qwen3_moe gemma4_text-experts olmoe deepseek_v2 deepseek_v3 gpt_oss granitemoe cohere2_moe exaone_moe "
    "deepseek_v32 glm_moe_dsa axk2 hy_v4"
)
"""Their experts are called one by one, each with the tokens that chose it: how many, the host has to know."""


@pytest.fixture
def graphs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    with graphs_on(device, monkeypatch) as made:
        yield made


def built(name: str, device: torch.device, **overrides: Any) -> Any:
    model: Any = family(name).build(**overrides)
    return model.to(device)


CAPTURED = [
    pytest.param(each, id=str(each), marks=[] if str(each) in QUICK.split() else [pytest.mark.slow])
    for each in FAMILIES
    if str(each).removesuffix("-window") not in EXPERTS.split()
]


# --- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.one_in(8)
@pytest.mark.parametrize("each", CAPTURED)
def test_greedy_tokens_are_plain_decodings(each, device, graphs):
    stats = assert_same(each.build().to(device), prompt(20).to(device), (PAPER, BUDGET), max_new_tokens=30)
    assert graphs.counted.replayed == stats.steps > graphs.counted.recorded > 1


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.7}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
def test_mtp_layers_read_the_states_that_captured_passes_leave(rows, sampling, device, graphs, tmp_path):
    model = llama_with_mtp(tmp_path).to(device)
    ids = torch.cat([prompt(20, seed) % 47 + 1 for seed in range(rows)]).to(device)
    config = lade.LookaheadConfig(budget=10, mtp=True)
    captured = assert_same(model, ids, [config], max_new_tokens=20, **sampling)
    assert captured.steps // rows <= graphs.counted.replayed > graphs.counted.recorded > 0
    graphs.captures = False
    again = load(tmp_path).to(device)  # knows nothing of its layer's predictions yet
    eager = assert_same(again, ids, [config], max_new_tokens=20, **sampling)
    assert captured.accepted == eager.accepted and captured.steps == eager.steps


def test_passes_with_and_without_states_share_buffers(device, graphs, tmp_path):
    model, ids = llama_with_mtp(tmp_path).to(device), (prompt(20) % 47 + 1).to(device)
    configs = [lade.LookaheadConfig(budget=10, mtp=mtp) for mtp in (True, False, True)]
    assert_same(model, ids, configs, max_new_tokens=30)
    assert len(buffers_in(graphs.pool(model))) == 1


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2"])
def test_attention_that_knows_trees(name, device, graphs, monkeypatch):
    masks, kernel_for = [], tree_attention.kernel_for

    def counted(*states: torch.Tensor) -> Any:
        masks.append(1)
        return None if device.type == "cpu" else kernel_for(*states)  # a tape does not see what an interpreter does

    monkeypatch.setattr(tree_attention, "kernel_for", counted)
    model = built(name, device, backend=tree_attention.NAME, dtype=torch.float32, num_hidden_layers=2)
    for rows in (1, 3):
        masks.clear()
        assert_same(model, torch.cat([prompt(20, seed) for seed in range(rows)]).to(device), max_new_tokens=30)
        assert graphs.counted.replayed > 0 and masks, "the masks of captured passes were dense"


@pytest.mark.parametrize("config", [CONFIGS[2], *now_and_then(*CONFIGS[3:])])
@pytest.mark.parametrize("name", ["qwen3", *now_and_then("qwen3_5_text", "lfm2")])
def test_any_method_at_any_size(name, config, device, graphs):
    model = built(name, device)
    for length, new in ((1, 12), (2, 1), (7, 2), (64, 20)):
        assert_same(model, prompt(length, seed=length).to(device), [config], max_new_tokens=new)


@pytest.mark.slow
def test_steps_larger_than_any_bucket(device, graphs):
    model = built("llama", device)
    stats = assert_same(model, prompt(20).to(device), [lade.LookaheadConfig(30, 8, 20)], max_new_tokens=20)
    assert max(stats.step_tokens) > 128 and 256 in {size for _, size, _ in shapes_of(graphs.pool(model))}


@pytest.mark.slow
def test_a_text_that_grows_out_of_its_key_bucket(device, graphs):
    model = built("mistral-window", device)
    assert_same(model, prompt(210).to(device), max_new_tokens=50)
    assert {keys for _, _, keys in shapes_of(graphs.pool(model))} == {256, 384}


def test_the_end_of_a_table_of_positions(device, graphs):
    assert_same(built("gpt2", device), prompt(CONTEXT - 20).to(device), max_new_tokens=20)
    assert graphs.counted.replayed > 0


@pytest.mark.parametrize("config", [BUDGET, *now_and_then(PAPER, "auto")])
@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", *now_and_then(*QUICK.split()[1:], *RECURRENT)])
def test_batches_with_padding_whose_rows_end_in_turn(name, config, device, graphs):
    model = build(family(name)).to(device)
    rows = {key: value.to(device) for key, value in batch(5, 20, 1, 11, 14).items()}
    arguments: dict[str, Any] = {"pad_token_id": 0, "max_new_tokens": 30}
    free = plain(model, **rows, **arguments)
    ends = (None, [int(free[1, 25]), int(free[3, 35])])
    stats = [assert_same(model, **rows, configs=[config], eos_token_id=end, **arguments) for end in ends]
    assert any(each.tokens_per_step > 1 for each in stats) or config == "auto"  # that goes by the clock
    assert len({rows for rows, _, _ in shapes_of(graphs.pool(model))}) > 1, "rows leave"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["llama", *now_and_then("qwen3_5_text", *RECURRENT)])
def test_samples_and_the_generator_afterwards(name, rows, device, graphs):
    model, ids = built(name, device, dtype=torch.float32), prompt(20).repeat(rows, 1).to(device)
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20}
    assert_same(model, ids, (PAPER, BUDGET), max_new_tokens=14, **sampling)
    assert graphs.counted.replayed > 0


def test_prefill_in_chunks(device, graphs):
    assert_same(built("gemma3_text", device), prompt(50).to(device), prefill_chunk_size=7, max_new_tokens=15)


def test_processors_and_beams(device, graphs):
    model, ids = built("llama", device), prompt(20).to(device)
    arguments: dict[str, Any]
    for arguments in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}):
        assert_same(model, ids, max_new_tokens=15, **arguments)
    for sampled in (False, True):
        assert_same_beams(model, ids, num_beams=3, num_return_sequences=3, do_sample=sampled, max_new_tokens=20)


def test_the_cache_that_is_handed_out(device, graphs):
    model, ids = built("llama", device), prompt(20).to(device)
    arguments = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 30}
    ours, expected = lookahead(model, ids, PAPER, **arguments), plain(model, ids, **arguments)
    assert graphs.counted.replayed > 0 and type(ours.past_key_values) is type(expected.past_key_values)
    torch.testing.assert_close(ours.scores, expected.scores)
    assert_same_parts(ours.past_key_values, expected.past_key_values)
    going_on = {"max_new_tokens": 20, "return_dict_in_generate": True}
    more = plain(model, expected.sequences, past_key_values=expected.past_key_values, **going_on)
    ours_more = lookahead(model, ours.sequences, PAPER, past_key_values=ours.past_key_values, **going_on)
    assert torch.equal(ours_more.sequences, more.sequences)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_not_kept_is_never_seen(rows, device, graphs, monkeypatch):
    """All that a pass leaves beside the accepted path is poisoned, and all that no pass looks at."""
    model, ids = built("gemma3_text", device), prompt(20).repeat(rows, 1).to(device)
    ids[:, 0] = torch.arange(1, rows + 1)
    expected = plain(model, ids, max_new_tokens=24)
    keep, poisoned = StaticCache.keep, []

    def poisoning(self: StaticCache, paths: Any, fed: int) -> None:
        seen = max(shape.keys for shape in self.buffers.passes)
        for group in self.buffers.groups:
            group[:, :, :, seen:-1] = torch.nan
            for row, (path, length) in enumerate(zip(paths, self.lengths, strict=True)):
                start, end = length - fed, self.rows.ends[row]
                dropped = [start + node for node in range(end - start) if node not in path]
                group[:, row, :, dropped] = torch.nan
                poisoned.append(len(dropped))
        keep(self, paths, fed)
        for group in self.buffers.groups:
            for row, length in enumerate(self.lengths):
                assert torch.isfinite(group[:, row, :, :length]).all()
                assert not group[:, row, :, length:seen].any(), "after a row's end all is zero"

    monkeypatch.setattr(StaticCache, "keep", poisoning)
    for config in (PAPER, BUDGET):
        assert torch.equal(lookahead(model, ids, config, max_new_tokens=24), expected)
    assert sum(poisoned) > 100


# --- what outlives a generation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", *now_and_then("lfm2")])
def test_a_second_generation_captures_nothing(name, device, graphs):
    model, recorded = built(name, device), []
    for seed in (0, 1, 0):
        assert_same(model, prompt(30, seed).to(device), [BUDGET], max_new_tokens=20)
        recorded.append(graphs.counted.recorded)
    assert recorded[2] == recorded[1] > 0 and len(buffers_in(graphs.pool(model))) == 1


def test_a_shorter_text_is_not_shown_a_longer_one(device, graphs):
    model = built("llama", device)
    for length, new in ((100, 5), (10, 30)):
        assert_same(model, prompt(length, seed=length).to(device), max_new_tokens=new)
    assert len(buffers_in(graphs.pool(model))) == 1


def test_buffers_grow_with_a_text_that_was_not_expected(device, graphs, monkeypatch):
    small_buffers(monkeypatch)
    model = built("llama", device)
    assert_same(model, prompt(210).to(device), max_new_tokens=50)
    (entry,) = buffers_in(graphs.pool(model))
    assert entry.buffers.slots > 256


def test_generations_at_the_same_time_have_buffers_of_their_own(device, graphs):
    model = built("llama", device)
    texts = [prompt(20, seed=seed).to(device) for seed in (0, 1)]
    streams = [lade.stream(model, input_ids=ids, max_new_tokens=20, do_sample=False, lookahead=PAPER) for ids in texts]
    written: list[list[int]] = [[], []]
    for steps in itertools.zip_longest(*streams):
        for tokens, step in zip(written, steps, strict=True):
            tokens.extend(step.tokens if step else [])
    assert written == [plain(model, ids, max_new_tokens=20)[0, 20:].tolist() for ids in texts]
    assert len(buffers_in(graphs.pool(model))) == 1, "of idle ones one is kept"


@pytest.mark.slow
def test_a_generation_without_an_end_does_not_keep_its_buffers(device, graphs):
    model, ids = built("llama", device), prompt(20).to(device)
    stream = lade.stream(model, input_ids=ids, max_new_tokens=40, do_sample=False, lookahead=PAPER)
    next(iter(stream))
    del stream
    gc.collect()
    lookahead(model, ids, PAPER, max_new_tokens=5)
    assert len(buffers_in(graphs.pool(model))) == 1


@pytest.mark.parametrize("where", ["criterion", "model"])
def test_a_generation_that_fails_gives_its_buffers_back(where, device, graphs, monkeypatch):
    """And copies nothing of them to a cache that is not handed out."""
    model, ids = built("llama", device), prompt(20).to(device)
    calls = itertools.count()

    def interrupt(*given: Any, **more: Any) -> torch.Tensor:
        if next(calls) == 6:
            raise KeyboardInterrupt
        return torch.zeros(1, dtype=torch.bool)

    arguments: dict[str, Any] = {"return_dict_in_generate": True, "max_new_tokens": 30}
    with monkeypatch.context() as patch:
        copied = watched(patch, StaticCache, "copy_to")
        if where == "model":
            failing(patch, GraphRunner, "_replay", KeyboardInterrupt, calls={7}, after=True)
        else:
            arguments["stopping_criteria"] = [interrupt]
        with pytest.raises(KeyboardInterrupt):
            lookahead(model, ids, PAPER, **arguments)
    assert not copied
    (entry,) = buffers_in(graphs.pool(model))
    assert entry.idle and entry.owner is None
    assert_same(model, ids, max_new_tokens=30)


def test_changed_weights_are_captured_again(device, graphs):
    model, ids = built("llama", device), prompt(20).to(device)
    arguments = {"max_new_tokens": 12}

    def check() -> torch.Tensor:
        ours: torch.Tensor = lookahead(model, ids, **arguments)
        assert torch.equal(ours, plain(model, ids, **arguments))
        return ours

    texts = [check()]
    with torch.no_grad():  # in place: what was captured reads them where they are
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    recorded = graphs.counted.recorded
    texts.append(check())
    assert graphs.counted.recorded <= recorded + 1  # perhaps a size that was not needed before
    for parameter in model.parameters():  # elsewhere
        parameter.data = parameter.data.flip(-1).clone()
    texts.append(check())
    model.set_attn_implementation("eager")
    texts.append(check())
    assert len({tuple(text[0].tolist()) for text in texts}) == 3


@pytest.mark.slow
def test_a_model_can_go(device, graphs):
    model, ids = built("llama", device), prompt(20).to(device)
    lookahead(model, ids, PAPER, max_new_tokens=10)
    gone, pool = weakref.ref(model), graphs.pool(model)
    graphs.forget()
    del model
    gc.collect()
    assert gone() is None and buffers_in(pool), "what was captured does not hold the model"


# --- where it does not work ------------------------------------------------------------------------------------------


NEVER_CAPTURED = {"deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"}
"""Their indexers pick keys, and no pass of theirs is captured at all."""


@pytest.mark.parametrize(
    "name", ["mixtral", *now_and_then(*(name for name in EXPERTS.split()[1:] if name not in NEVER_CAPTURED))]
)
def test_what_cannot_be_captured_runs_eagerly_with_one_warning(name, device, graphs):
    model, ids = built(name, device), prompt(20).to(device)
    expected = plain(model, ids, max_new_tokens=20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for config in (PAPER, BUDGET):
            assert torch.equal(lookahead(model, ids, config, max_new_tokens=20), expected), config
    (warning,) = caught
    assert warning.category is CaptureWarning and "cannot be captured" in str(warning.message)
    assert graphs.counted.recorded == 0 and not buffers_in(graphs.pool(model)), "they will not be acquired again"


def test_who_is_served_by_graphs(monkeypatch):
    model = family("llama").build()
    plan = lade.supports(model).require()
    config = GenerationConfig()
    assert type(runner_for(ModelFacts.of(model), plan, config)) is EagerRunner, "never on a CPU"
    for module in (choice, select_runner):
        monkeypatch.setattr(module, "input_device", lambda model: torch.device("cuda"))
    reason, pool = [""], BufferPool(EagerReplay)
    monkeypatch.setattr(choice, "capture_refusal", lambda model, facts: reason[-1])
    monkeypatch.setattr(choice, "pool_of", lambda model, device: pool)
    assert type(runner_for(ModelFacts.of(model), plan, config)) is GraphRunner
    assert type(runner_for(ModelFacts.of(model), plan, config, own_cache=False)) is EagerRunner
    with pytest.warns(CaptureWarning, match="RuntimeError: the reason"):
        pool.capture_failed(capture_setup(model), RuntimeError("the reason\nand more"))
    assert type(runner_for(ModelFacts.of(model), plan, config)) is EagerRunner, "not a second time"
    pool.capture_failed_in = None
    reason.append("something")
    assert type(runner_for(ModelFacts.of(model), plan, config)) is EagerRunner


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        ("", lambda model: model(prompt(5), output_hidden_states=True)),  # the hooks that this leaves do nothing
        ("hooks", lambda model: model.model.layers[1].register_forward_hook(lambda *given: None)),
        ("hooks", lambda model: model.lm_head.register_forward_pre_hook(lambda *given: None)),
        ("hooks", lambda model: setattr(model.model.layers[0], "_hf_hook", object())),
        ("replaced", lambda model: setattr(model, "forward", model.forward)),
        ("several devices", lambda model: model.lm_head.to("meta")),
    ],
)
def test_why_a_model_is_not_captured(reason, change):
    model: Any = family("llama").build()
    assert capture_refusal(model) == ""
    change(model)
    assert bool(capture_refusal(model)) == bool(reason) and reason in capture_refusal(model)


def test_frequencies_that_the_host_decides_about():
    assert "frequencies" in capture_refusal(family("phi3").build(**longrope()))
    assert "frequencies" in capture_refusal(family("llama").build(**DYNAMIC))


def test_autocast_decides_by_itself():
    model = family("llama").build(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in capture_refusal(model)


# --- when memory runs out --------------------------------------------------------------------------------------------


@pytest.mark.one_in(12)
@pytest.mark.parametrize("where", ["growth", "start", "capture"])
@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5_text"])
def test_a_generation_goes_on_without_memory(name, rows, where, device, graphs, monkeypatch):
    """For static buffers at all, for larger ones, or for a capture; the next one finds some again."""
    small_buffers(monkeypatch)
    model, length = built(name, device), 210 if where == "growth" else 20
    ids = torch.cat([prompt(length, seed) for seed in range(rows)]).to(device)
    expected = plain(model, ids, max_new_tokens=50)

    def is_too_large(buffers: Buffers, layers: Any, rows: int, slots: int) -> bool:
        return where == "start" or (where == "growth" and slots > 256)

    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        failing(patch, Buffers, "__init__", torch.OutOfMemoryError, where=is_too_large)
        failing(patch, BufferPool, "record", torch.OutOfMemoryError, calls={2} if where == "capture" else ())
        assert torch.equal(lookahead(model, ids, PAPER, max_new_tokens=50), expected)
    (warning,) = caught
    assert warning.category is CaptureWarning and "no memory" in str(warning.message)
    before, entries = graphs.counted.replayed, buffers_in(graphs.pool(model))
    assert (before > 0) is (where != "start") and not entries, "what was there made way"
    assert torch.equal(lookahead(model, ids, PAPER, max_new_tokens=50), expected)
    assert graphs.counted.replayed > before


@pytest.mark.parametrize("where", ["growth", "end"])
def test_the_cache_that_is_handed_out_without_memory(where, device, graphs, monkeypatch):
    """The rows were moved in the middle of the text, or there is no memory for static buffers and a copy of them."""
    model, ids = built("llama", device), prompt(20).to(device)
    arguments = {"return_dict_in_generate": True, "max_new_tokens": 30}
    expected = plain(model, ids, **arguments)
    failed: list[Any] = []
    name = {"growth": "make_room", "end": "copy_to"}[where]
    failed = failing(
        monkeypatch, StaticCache, name, torch.OutOfMemoryError,
        where=lambda *given: not failed and graphs.counted.replayed > 3,
    )  # fmt: skip
    with pytest.warns(CaptureWarning, match="no memory"):
        ours = lookahead(model, ids, PAPER, **arguments)
    assert failed and torch.equal(ours.sequences, expected.sequences)
    assert_same_parts(ours.past_key_values, expected.past_key_values)


# --- one synchronisation a step --------------------------------------------------------------------------------------

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9}
BLIND = {"do_sample": False, "suppress_tokens": [3, 5]}


@pytest.mark.one_in(14)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("config", [PAPER, BUDGET, *now_and_then("auto")])
@pytest.mark.parametrize("arguments", [{}, SAMPLED, BLIND], ids=["greedy", "sampled", "processed"])
def test_the_host_looks_at_a_tensor_once_a_step(rows, config, arguments, graphs, monkeypatch):
    if graphs.device.type != "cpu":
        pytest.skip("there, torch itself counts: see the next test")

    def read(logits: torch.Tensor, choices: torch.Tensor | None = None, *, wants_entries: bool = True) -> Any:
        return readout._read_on_device(logits, choices, wants_entries=wants_entries)

    monkeypatch.setattr(loop, "read", read)  # as if they lay elsewhere
    chosen_at_once(monkeypatch, True)
    model, ids = built("llama", graphs.device, dtype=torch.float32), prompt(20).repeat(rows, 1)
    ids[:, 0] = torch.arange(1, rows + 1)
    looks: list[str] = []
    for name in ("cpu", "tolist", "item", "__int__", "__bool__", "__float__", "__index__"):
        watched(monkeypatch, torch.Tensor, name, lambda *_, name=name, **__: looks.append(name))
    watched(monkeypatch, loop.DecodeLoop, "step", lambda _: looks.clear())
    counts = answered(monkeypatch, loop.DecodeLoop, "step", lambda *_: len(looks))
    lookahead(model, ids, config, max_new_tokens=30, **arguments)
    assert len(counts) > 3 and set(counts) == {1}


@pytest.mark.gpu
@NO_CUDA
def test_graphs_are_chosen_where_there_are_some():
    device = torch.device("cuda")
    model, ids = built("llama", device), prompt(20).to(device)
    assert_same(model, ids)
    pool = pool_of(model, device)
    assert isinstance(buffers_in(pool)[0].capture, CudaCapture) and shapes_of(pool)


@pytest.mark.gpu
@NO_CUDA
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("config", [PAPER, BUDGET, "auto"], ids=["paper", "budget", "auto"])
@pytest.mark.parametrize("arguments", [{}, SAMPLED, BLIND], ids=["greedy", "sampled", "processed"])
def test_a_step_waits_for_the_device_once(rows, config, arguments):
    device = torch.device("cuda")
    model, ids = built("llama", device), prompt(20).repeat(rows, 1).to(device)
    ids[:, 0] = torch.arange(1, rows + 1)
    lookahead(model, ids, config, max_new_tokens=40, **arguments)  # captures
    stats = lade.Stats()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lookahead(model, ids, config, max_new_tokens=40, stats=stats, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [w for w in caught if "synchronizing CUDA operation" in str(w.message)]
    steps = stats.steps / rows
    assert steps > 3 and len(waits) <= steps + 20, "20 for prefill, and rows that leave"
