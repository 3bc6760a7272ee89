"""The kernels for CUDA in Triton's interpreter (`make test-kernel`): right, and a row's bits are its own."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import Case, attention, cases, tree_of

triton = pytest.importorskip("triton", reason="Triton is not installed: make test-kernel")
launch: ModuleType = pytest.importorskip("lade.model.invariant_kernels.launch")

INTERPRETED = not isinstance(launch.multiply_part, triton.runtime.JITFunction)
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="not tried on a GPU: make test-kernel")
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3}
"""Largest relative error; the interpreter multiplies bfloat16 as if they were integers."""
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FEATURES_OF_PART", 128)


def rows_are_alike(dtype: torch.dtype = torch.float32) -> bool:
    """Whether a product's rows have the same bits in passes over 1 to 128 rows."""
    x, weight, bias = drawn(128, 300, dtype=dtype), drawn(70, 300, dtype=dtype, seed=1), drawn(70, dtype=dtype, seed=2)
    whole = launch.multiply(x, weight, bias)
    parts = ((rows, first) for rows in (1, 2, 3, 15, 16, 17, 40, 64) for first in (0, 5, 63))
    return all(
        torch.equal(launch.multiply(x[first : first + rows], weight, bias), whole[first : first + rows])
        for rows, first in parts
    )


@DTYPES
@pytest.mark.usefixtures("small_parts")
def test_products(dtype):
    x, weight = drawn(19, 300, dtype=dtype), drawn(70, 300, dtype=dtype, seed=1)
    expected = x.double() @ weight.double().T
    error = (launch.multiply(x, weight).double() - expected).abs().max() / expected.abs().max()
    assert error < BOUNDS[dtype]
    assert rows_are_alike(dtype)


@pytest.mark.usefixtures("small_parts")
def test_a_sum_that_is_split_by_the_number_of_rows_is_caught(monkeypatch):
    right = launch.multiply

    def split_otherwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        monkeypatch.setattr(launch, "FEATURES_OF_PART", 64 if len(x) == 1 else 128)
        return right(x, weight, bias)

    monkeypatch.setattr(launch, "multiply", split_otherwise)
    assert not rows_are_alike()


@DTYPES
@pytest.mark.parametrize("centred", [False, True])
def test_norms(dtype, centred):
    x, weight, bias = drawn(9, 200, dtype=dtype), drawn(200, dtype=dtype, seed=1), drawn(200, dtype=dtype, seed=2)
    whole = launch.normalise(x, weight, bias, eps=1e-5, centred=centred)
    wide = [each.double() for each in (weight, bias)]
    if centred:
        expected = torch.nn.functional.layer_norm(x.double(), (200,), *wide, eps=1e-5)
    else:
        expected = torch.nn.functional.rms_norm(x.double(), (200,), wide[0], eps=1e-5) + wide[1]
    torch.testing.assert_close(whole.double(), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    for row in range(len(x)):
        alone = launch.normalise(x[row : row + 1], weight, bias, eps=1e-5, centred=centred)
        assert torch.equal(alone[0], whole[row])


def states(case: Case, group: int, dtype: torch.dtype) -> list[torch.Tensor]:
    rows, step, slots = case.allowed().shape
    shapes = (rows, 2 * group, step, 16), (rows, 2, slots, 16), (rows, 2, slots, 24)
    return [drawn(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def paths_are_alike(case: Case, group: int, dtype: torch.dtype) -> bool:
    """Whether each node has the bits of its path alone, which lies in slots of its own, as plain decoding has it."""
    query, key, value = states(case, group, dtype)
    allowed, positions = case.allowed(), case.dense.key_positions
    slots = launch.slots_by_position(allowed, positions)
    whole = launch.attend(query, key, value, slots, scale=0.25, softcap=5.0)
    for row, node in ((row, node) for row, tree in enumerate(case.trees) for node in range(len(tree) - case.cached)):
        seen = allowed[row, node].nonzero()[:, 0]
        at = positions[row, seen]
        places = torch.full((1, 1, int(at.max()) + 1), -1, dtype=torch.int32)
        places[0, 0, at] = torch.arange(len(seen), dtype=torch.int32)
        one = query[row : row + 1, :, node : node + 1]
        path = key[row : row + 1, :, seen], value[row : row + 1, :, seen]
        if not torch.equal(launch.attend(one, *path, places, scale=0.25, softcap=5.0)[0, 0], whole[row, node]):
            return False
    return True


@DTYPES
@settings(max_examples=examples(8))
@given(cases(most_nodes=6, longest=40), st.sampled_from([1, 3]), st.booleans())
def test_attention(dtype, case, group, with_sinks):
    query, key, value = states(case, group, dtype)
    sinks = drawn(query.shape[1], seed=3) if with_sinks else None
    slots = launch.slots_by_position(case.allowed(), case.dense.key_positions)
    found = launch.attend(query, key, value, slots, scale=0.25, softcap=5.0, sinks=sinks)
    expected = attention(query, key, value, case.allowed(), 0.25, 5.0, sinks)
    torch.testing.assert_close(found.double(), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    assert paths_are_alike(case, group, dtype)


LONG = Case([tree_of([0, 1, 0, 2])], [300])
"""Behind the border of a part of the positions."""


def test_a_long_text():
    assert paths_are_alike(LONG, 2, torch.float32)


def test_parts_that_begin_at_slots_and_not_at_positions_are_caught(monkeypatch):
    right = launch.slots_by_position

    def moved(allowed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(right(allowed, positions), (1, 0), value=-1)

    monkeypatch.setattr(launch, "slots_by_position", moved)
    assert not paths_are_alike(LONG, 2, torch.float32)


def test_another_order_of_merging_is_caught(monkeypatch):
    right = launch.merge_parts

    class Backwards:
        def __getitem__(self, grid):
            def merge(parts, tops, totals, *others, **options):
                order = slice(None) if parts.shape[1] == 1 else torch.arange(len(parts) - 1, -1, -1)
                right[grid](parts[order], tops[order], totals[order], *others, **options)

            return merge

    monkeypatch.setattr(launch, "merge_parts", Backwards())
    assert not paths_are_alike(Case([LONG.trees[0]], [700]), 2, torch.float32)
