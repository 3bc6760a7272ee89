"""When kernels are compiled, and what becomes of their machine code."""

import numba
import pytest

from lade.decoding import kernels
from lade.decoding.compilation import Kernel, TeamKernel, compile_all, compiled


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


def test_other_problems_of_what_a_team_enters_are_not_hidden(monkeypatch):
    def cfunc(types, cache=False, **options):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(numba, "cfunc", cfunc)
    with pytest.raises(RuntimeError, match="out of registers"):
        TeamKernel(len).compile()


def test_machine_code_is_kept_where_it_can_be(monkeypatch):
    asked = []

    def njit(types, cache=False):
        asked.append((types, cache))
        if cache and fails:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: (function, cache)

    monkeypatch.setattr(numba, "njit", njit)
    fails = False
    assert compiled(1, 2)(len).compile() == (len, True)
    fails = True
    assert compiled(1, 2)(len).compile() == (len, False)
    assert asked == [((1, 2), True), ((1, 2), True), ((1, 2), False)]


def test_other_problems_of_the_compiler_are_not_hidden(monkeypatch):
    def njit(types, cache=False):
        if cache:
            raise RuntimeError("out of registers")
        return lambda function: function

    monkeypatch.setattr(numba, "njit", njit)
    with pytest.raises(RuntimeError, match="out of registers"):
        compiled(1)(len).compile()


def test_kernels_are_compiled_when_they_are_called_or_all_at_once(monkeypatch):
    compile_all(kernels)
    made = []
    monkeypatch.setattr(Kernel, "_compiled", lambda kernel: made.append(kernel.__wrapped__) or len)
    kernel = compiled(numba.int64)(len)
    assert made == []
    assert kernel("four") == kernel("four") == 4
    assert made == [len], "once"
    monkeypatch.setattr(kernels, "late", compiled(numba.int64)(abs), raising=False)
    compile_all(kernels)
    assert made == [len, abs], "all others had been compiled"
