"""Kernels see addresses: nothing that they are given may depend on torch's default dtype or device."""

import ast
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pretend import short_trials

import lade
from lade.testing import toy_model

pytestmark = [pytest.mark.by_processor, pytest.mark.usefixtures("rounds_alike")]

CPU = Path(lade.__file__).parent / "backends" / "cpu"
ALLOCATING = frozenset(
    "arange empty eye full linspace logspace ones rand randint randn randperm tensor zeros".split()  # noqa: SIM905
)
IDS = torch.randint(1, 40, (1, 150), generator=torch.Generator().manual_seed(0))


def allocations(path):
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in ALLOCATING:
                yield node.lineno, {keyword.arg for keyword in node.keywords}


def test_every_allocation_beside_kernels_says_dtype_and_device():
    found = [(path, *allocation) for path in CPU.rglob("*.py") for allocation in allocations(path)]
    assert len(found) > 20 and [(path, line) for path, line, given in found if not {"dtype", "device"} <= given] == []


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def made(weights, dtype=torch.float32):
    """An invariant model, packed and tried while torch's default is this dtype."""
    model = toy_model(dtype=torch.bfloat16)
    with default_dtype(dtype):
        if weights is not None:
            lade.pack(model, weights=weights if weights != "bfloat16" else None, min_weights=1)
        return lade.invariant(model)


def written(model, **more):
    return lade.generate(model, input_ids=IDS, max_new_tokens=12, do_sample=False, **more)


@pytest.mark.parametrize("weights", [None, "bfloat16", "int8", "int4"])
def test_texts_are_the_same_with_another_default_dtype(weights, monkeypatch):
    short_trials(monkeypatch)
    model = made(weights)
    expected = written(model)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with default_dtype(dtype):
            assert torch.equal(written(model), expected), dtype
            assert torch.equal(written(model, lookahead=None), expected), dtype
        assert torch.equal(written(made(weights, dtype)), expected), dtype


def test_texts_are_the_same_where_another_thread_loads_models():
    """As `from_pretrained` does, which changes the default dtype of the whole process while it lasts."""
    model, done = made("bfloat16"), threading.Event()
    expected = written(model)

    def flicker():
        while not done.is_set():
            with default_dtype(torch.bfloat16):
                done.wait(1e-4)

    thread = threading.Thread(target=flicker)
    thread.start()
    try:
        found = [written(model) for _ in range(5)]
    finally:
        done.set()
        thread.join()
    assert all(torch.equal(each, expected) for each in found)


def test_kernels_do_not_follow_the_default_device():
    from lade.backends.cpu.invariant.attention import PlacedMask, attention_of
    from lade.backends.cpu.invariant.functions import times_logistic

    query, key, value = (
        torch.randn(1, 2, count, 16, generator=torch.Generator().manual_seed(1)) for count in (5, 9, 9)
    )
    mask = PlacedMask.of(torch.ones(1, 1, 5, 9, dtype=torch.bool), torch.arange(9)[None])
    given = query, key, value, mask, 0.25, None, None
    expected, activated = attention_of(*given), times_logistic(query)
    try:
        torch.set_default_device("meta")
        found, again = attention_of(*given), times_logistic(query)
    finally:
        torch.set_default_device(None)
    assert torch.equal(found, expected) and torch.equal(again, activated)
