"""The Triton kernel against float64, in Triton's interpreter on a CPU or compiled on a GPU; that it compiles, anywhere.

The interpreter is chosen before Triton is imported, so its tests are a command of their own: `make test-kernel`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pretend import own_kernel_cache
from trees import Case, attention, cases, sees, tree_of

from lade.backends.tree_attention.tree_mask import TreeMask
from lade.model.inputs import AttentionSpan

triton = pytest.importorskip("triton", reason="Triton is not installed: make test-kernel")
launch: ModuleType = pytest.importorskip("lade.backends.tree_attention.launch")
Tiles = launch.Tiles

INTERPRETED = launch.interprets()
NO_CUDA = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
NOT_INTERPRETED = pytest.mark.skipif(
    not INTERPRETED, reason="compiled code needs a GPU: make test-kernel interprets it"
)
DEVICES = [pytest.param("cpu", marks=NOT_INTERPRETED), pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]
BOUNDS = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest error of a mean of standard normal values; about twice what was seen."""
BIG = [
    ((2, 4, 128, 128), AttentionSpan()),
    ((1, 8, 64, 64), AttentionSpan(window=50)),
    ((4, 1, 256, 256), AttentionSpan(window=50)),
    ((3, 2, 192, 128), AttentionSpan(chunk=64)),
]


@pytest.fixture(params=DEVICES, scope="module")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is allocated holds NaN, so that an entry that is never written is seen."""
    new_empty = torch.Tensor.new_empty

    def new_poison(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        made = new_empty(self, *args, **kwargs)  # type: ignore[arg-type]
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", new_poison)
    yield


def states(
    case: Case, kv_heads: int, group: int, key_dim: int, value_dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as models have them: views with their heads in front."""
    rows, step, slots = case.allowed().shape
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, step, kv_heads * group, key_dim, generator=generator).transpose(1, 2)
    key = torch.randn(rows, slots + 5, kv_heads, key_dim, generator=generator).transpose(1, 2)[:, :, :slots]
    value = torch.randn(rows, kv_heads, slots + 5, value_dim, generator=generator)[:, :, :slots]
    return query.to(dtype), key.to(dtype), value.to(dtype)


def poisoned(case: Case, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with NaN or infinity wherever no query of the row looks."""
    unseen = ~case.allowed().any(dim=1)[:, None, :, None]
    return key.masked_fill(unseen, math.nan), value.masked_fill(unseen, math.inf)


tiles = st.builds(
    Tiles,
    queries=st.sampled_from([16, 32]),
    keys=st.sampled_from([16, 32]),
    splits=st.integers(1, 5),
    warps=st.just(4),
    stages=st.just(2),
)
shapes = st.tuples(
    st.integers(1, 2), st.integers(1, 4), st.sampled_from([16, 24, 40, 64]), st.sampled_from([16, 32, 48])
)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@given(cases(longest=40), shapes, tiles, st.sampled_from([None, 2.0, 50.0]), st.booleans())
@example(Case([tree_of([0])], [0]), (1, 1, 16, 16), Tiles(16, 16, 5, 4, 2), None, False)  # parts that see nothing
@example(
    Case([tree_of([]), tree_of([0] * 39)], [60, 0], AttentionSpan(7)), (2, 3, 24, 16), Tiles(16, 16, 3, 4, 2), 2.0, True
)
@settings(max_examples=15 if INTERPRETED else 3)  # compiling takes seconds
def test_it_is_attention(dtype, device, case, shape, tiles, softcap, with_sinks):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bfloat16 as if they were integers")
    query, key, value = states(case, *shape, dtype)
    sinks = torch.randn(query.shape[1]).to(dtype) if with_sinks else None
    scale = query.shape[-1] ** -0.5
    expected = attention(query, key, value, case.allowed(), scale, softcap, sinks)
    key, value = poisoned(case, key, value)
    found = launch.attend(
        *(each.to(device) for each in (query, key, value)),
        case.mask(device),
        scale=scale,
        softcap=softcap,
        sinks=None if sinks is None else sinks.to(device),
        tiles=tiles,
    )
    assert found.shape == expected.shape and found.dtype == dtype and found.is_contiguous()
    assert (found.cpu().double() - expected).abs().max() < BOUNDS[dtype]


@pytest.mark.parametrize(("shape", "span"), BIG, ids=str)
def test_the_tiles_it_chooses_itself(device, shape, span):
    case = Case([tree_of(list(range(0, 90, 3)))], [150], span)
    for dtype, bound in BOUNDS.items():
        if INTERPRETED and dtype != torch.float32:
            continue
        query, key, value = states(case, *shape, dtype)
        expected = attention(query, key, value, case.allowed(), 0.1)
        found = launch.attend(*(each.to(device) for each in (query, key, value)), case.mask(device), scale=0.1)
        assert (found.cpu().double() - expected).abs().max() < bound


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter's numpy
@pytest.mark.parametrize("splits", [1, 2, 7])
def test_a_branch_that_overflows_harms_only_those_who_see_it(device, splits):
    tree = tree_of([0, 1, 0, 3, 3])
    case = Case([tree], [21])
    query, key, value = (each.to(device) for each in states(case, 1, 2, 16, 16, torch.float32))
    tiling = Tiles(16, 16, splits, 4, 2)
    clean = launch.attend(query, key, value, case.mask(device), scale=1.0, tiles=tiling)
    for harm in (math.nan, math.inf, -math.inf):
        for states_harmed in ("key", "value"):
            harmed = {"key": key.clone(), "value": value.clone()}
            harmed[states_harmed][0, 0, 21 + 3, :5] = harm
            found = launch.attend(query, **harmed, mask=case.mask(device), scale=1.0, tiles=tiling)
            for node in range(len(tree)):
                seen = sees(tree, node, 3)
                assert torch.equal(found[0, node], clean[0, node]) != seen, (harm, states_harmed, node)
                if states_harmed == "value":
                    assert torch.equal(found[0, node].isnan().any(0).cpu(), torch.arange(16) < (5 if seen else 0))


def test_a_query_that_sees_nothing_gives_nothing(device):
    case = Case([tree_of([0])], [0])
    query, key, value = (each.to(device) for each in states(case, 1, 1, 16, 16, torch.float32))
    slots = case.mask(device).slots
    blind = TreeMask(type(slots)(**{**vars(slots), "ancestors": torch.zeros_like(slots.ancestors)}), AttentionSpan())
    for splits in (1, 3):
        found = launch.attend(query, key, value, blind, scale=1.0, tiles=Tiles(16, 16, splits, 4, 2))
        assert torch.equal(found, torch.zeros_like(found))


def test_rows_may_begin_their_trees_in_slots_of_their_own(device):
    case = Case([tree_of([0, 0, 1]), tree_of([0, 1])], [9, 2])
    query, key, value = states(case, 2, 2, 16, 16, torch.float32)
    expected = attention(query, key, value, case.allowed(), 0.3)
    slots, place = case.mask(device).slots, 3  # of the second row's tree: right after its text, but for one slot
    for each in (key, value):
        tree = each[1, :, 9:13].clone()
        each[1, :, 2:] = math.nan
        each[1, :, place : place + 4] = tree
    firsts = torch.tensor([9, place], dtype=torch.int32, device=device)
    mask = TreeMask(type(slots)(**{**vars(slots), "firsts": firsts}), AttentionSpan())
    found = launch.attend(*(each.to(device) for each in (query, key, value)), mask, scale=0.3).cpu()
    assert (found.double() - expected).abs().max() < BOUNDS[torch.float32]


def test_heads_beyond_the_largest_and_double_precision_are_not_served(device):
    def served(dtype: torch.dtype, dim: int) -> bool:
        return launch.serves(*(torch.empty(1, 1, 1, dim, dtype=dtype, device=device) for _ in range(3)))

    assert served(torch.float32, 16) and served(torch.float16, 256) and served(torch.bfloat16, 64) != INTERPRETED
    assert not served(torch.float64, 16) and not served(torch.float32, 272)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("shape", [(1, 4, 128, 128), (8, 4, 256, 256), (16, 4, 128, 128), (64, 1, 128, 64)], ids=str)
def test_it_compiles_into_what_a_small_gpu_has(shape, capability, tmp_path, monkeypatch):
    """99 KB of shared memory is the least that a GPU of capability 8 or 9 gives one program."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    own_kernel_cache(monkeypatch, tmp_path)
    step, group, key_dim, value_dim = shape
    half = {"dtype": torch.bfloat16, "device": "meta"}
    query, key, value = (
        torch.empty(1, heads, length, dim, **half)
        for heads, length, dim in ((8 * group, step, key_dim), (8, 4096, key_dim), (8, 4096, value_dim))
    )
    chosen = Tiles.fitting(query, key, value)
    constants = {"KV_HEADS": 8, "GROUP": group, "SPLIT": True, "TILE": chosen.queries, "KEYS": chosen.keys}
    constants |= {"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "KEY_BLOCK": key_dim, "VALUE_BLOCK": value_dim}
    constants |= {"WINDOW": step == 64, "CHUNK": False, "SOFTCAP": step == 8, "SINKS": step == 16}
    types = dict.fromkeys(("query", "key", "value", "sinks"), "*bf16") | dict.fromkeys(("out", "log_sums"), "*fp32")
    types |= dict.fromkeys(("lengths", "firsts", "positions", "node_positions", "ancestors"), "*i32")
    types |= dict.fromkeys(("scale", "softcap", "log2e"), "fp32") | dict.fromkeys(constants, "constexpr")
    names = launch.attend_tile.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if types.get(name, "")[:1] == "*"}
    source = ASTSource(launch.attend_tile, {name: types.get(name, "i32") for name in names}, constants, aligned)
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.metadata.shared <= 99 * 1024 and compiled.asm["cubin"]


FUSED = {
    "_norm": ({"ADD": True, "ADD_NORM": True, "FROM_ONE": True, "BLOCK": 4096}, {"columns": "i32", "eps": "fp32"}, 8),
    "_rotate_and_store": ({"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "BLOCK": 128, "NORMS": True, "FROM_ONE": False},
        {"slots": "*i64", "step": "i32", "row_stride": "i32", "head_stride": "i32", "slot_stride": "i32",
        "eps": "fp32"}, 1),
    "_gated_product": ({"TANH": True, "BLOCK": 1024}, {"columns": "i32"}, 4),
}  # fmt: skip


@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", FUSED)
def test_kernels_of_fused_passes_compile(name, dtype, tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from lade.backends.cuda_graphs import fused_kernels

    own_kernel_cache(monkeypatch, tmp_path)
    constants, others, warps = FUSED[name]
    kernel = getattr(fused_kernels, name)
    types = {each: others.get(each, f"*{dtype}") for each in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    compiled = triton.compile(
        ASTSource(kernel, types, constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
    assert compiled.asm["cubin"]
