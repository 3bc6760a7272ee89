"""When kernels are compiled, and what becomes of their machine code."""

import importlib

import numba
import pytest

from lade import compilation
from lade.compilation import Kernel, TeamKernel, compiled


def without_a_file(returned="2 * x"):
    """A function that numba finds no source file of, and so no folder to keep its machine code in."""
    names: dict = {}
    exec(compile(f"def double(x):\n    return {returned}", "nowhere", "exec"), names)
    return names["double"]


def test_what_cannot_be_kept_is_compiled_all_the_same():
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit((numba.int64,), cache=True)(without_a_file())
    double = compiled(numba.int64)(without_a_file())
    assert double(21) == 42 and len(double.compile().signatures) == 1


def test_the_same_is_so_of_what_a_team_enters():
    nothing = TeamKernel(without_a_file("None"))
    nothing(21)
    assert nothing.address and nothing.compile() is nothing.compile()


@pytest.mark.parametrize("kernel", [Kernel(max, (numba.int64,)), TeamKernel(max)])
def test_other_problems_are_not_hidden(monkeypatch, kernel):
    def cache(function, sources):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(compilation, "KernelCache", cache)
    monkeypatch.setattr(kernel, "__wrapped__", lambda x: None)
    with pytest.raises(RuntimeError, match="out of registers"):
        kernel.compile()


@pytest.mark.parametrize("what", ["double", "count"])
def test_machine_code_is_kept_from_one_kernel_to_the_next(monkeypatch, tmp_path, what):
    (tmp_path / "some_functions.py").write_text("def double(x):\n    return 2 * x\n\ndef count(x):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = getattr(importlib.import_module("some_functions"), what)
    kernels = [TeamKernel(function) if what == "count" else Kernel(function, (numba.int64,)) for _ in range(2)]
    hits = [(getattr(each.compile(), "stats", None) or each.compile()).cache_hits for each in kernels]
    assert [bool(each) for each in hits] == [False, True]
    assert kernels[1](21) == (None if what == "count" else 42)


def test_where_numba_is_switched_off_the_function_itself_is_called(monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", True)
    double = without_a_file()
    assert Kernel(double, (numba.int64,)).compile() is double


def test_kernels_are_compiled_when_they_are_called(monkeypatch):
    made = []
    monkeypatch.setattr(Kernel, "_compiled", lambda kernel: made.append(kernel.__wrapped__) or len)
    kernel = compiled(numba.int64)(len)
    assert made == []
    assert kernel("four") == kernel("four") == 4
    assert made == [len], "once"
