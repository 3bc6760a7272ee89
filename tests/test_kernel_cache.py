"""Machine code that is kept, and what it is made of."""

import subprocess
import sys

import pytest

from lade.compilation import sources_of

CALLED = """
from lade.compilation import inlined
FACTOR = 2
@inlined
def times(x):
    return FACTOR * x
"""
KERNELS = """
import numba
from lade.compilation import TeamKernel, compiled
from kernels.called import times
@compiled(numba.int64)
def multiply(x):
    return times(x)
def _multiply(address):
    times(address)
multiply_in_team = TeamKernel(_multiply)
"""
RUN = """
import sys
from kernels.calling import multiply, multiply_in_team
exec(sys.argv[1])
result, team = multiply(21), multiply_in_team.compile()
print(result, sum(multiply.compile().stats.cache_hits.values()), team.cache_hits)
"""


@pytest.fixture
def package(tmp_path):
    """The folder of a package with two files, one of which calls the other."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name, content in {"__init__": "", "called": CALLED, "calling": KERNELS}.items():
        (folder / f"{name}.py").write_text(content)
    return folder


def run(folder, between="pass"):
    """In a new process what 21 is multiplied to, and whether the machine code of either kernel had been kept."""
    command = [sys.executable, "-B", "-c", RUN, between]  # Python's own cache looks at sizes and whole seconds
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_an_edited_file_that_a_kernel_calls_makes_it_compile_again(package):
    assert [run(package), run(package)] == [[42, 0, 0], [42, 1, 1]]
    (package / "called.py").write_text(CALLED.replace("FACTOR = 2", "FACTOR = 3"))
    assert [run(package), run(package)] == [[63, 0, 0], [63, 1, 1]]
    (package / "new.py").touch()
    assert run(package) == [63, 0, 0], "another file"
    (package / "notes.txt").touch()
    assert run(package) == [63, 1, 1], "not one of Python"


def test_what_was_edited_after_it_was_read_is_not_taken_for_compiled(package):
    """As by an upgrade beneath a server that has not been asked for anything yet."""
    edited = CALLED.replace("FACTOR = 2", "FACTOR = 3")
    assert run(package, f"open({str(package / 'called.py')!r}, 'w').write({edited!r})") == [42, 0, 0]
    assert run(package) == [63, 0, 0]


def test_only_packages_of_kernels_have_sources():
    assert sources_of(sources_of) == sources_of(max) == b""
