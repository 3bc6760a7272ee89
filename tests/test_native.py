"""The compiled library: found, checked against its sources, and done without."""

import inspect
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lade import native, version
from lade.decoding.kernels import layout
from lade.native import sources


def test_the_digest_changes_with_any_source_and_with_the_constants(tmp_path):
    assert not sources.digest_of(tmp_path)
    (tmp_path / "one.cpp").write_text("int one;")
    first = sources.digest_of(tmp_path)
    (tmp_path / "one.h").write_text("")
    second = sources.digest_of(tmp_path)
    (tmp_path / "one.py").write_text("no source of the library")
    assert first and second and first != second == sources.digest_of(tmp_path)
    folder = tmp_path / "lade/native"
    layout = sources.layout_beside(folder)
    for made in folder, layout.parent:
        made.mkdir(parents=True)
    (folder / "one.cpp").write_text("int one;")
    layout.write_text("WIDTH = 6")
    before = sources.digest_of(folder)
    layout.write_text("WIDTH = 7")
    assert before != sources.digest_of(folder)


def test_the_build_hands_all_constants_of_the_layout_to_the_compiler():
    header = sources.header_of(sources.layout_beside(Path(native.__file__).parent))
    values = dict(re.findall(r"constexpr (?:int|double) (\w+(?:\[\])?) = (.*);", header))
    given = {name: value for name, value in vars(layout).items() if name.isupper()}
    assert {name.removesuffix("[]") for name in values} == given.keys() > {"LENGTHS", "WIDTH", "SCALE"}
    for name, value in given.items():
        if isinstance(value, tuple):
            assert values[f"{name}[]"] == str(value).replace("(", "{").replace(")", "}")
        else:
            assert float(values[name]) == value


@pytest.mark.parametrize("stale", [False, True])
def test_without_a_library_that_fits_one_line_says_so(stale, tmp_path, monkeypatch, caplog):
    if stale and native.library() is None:
        pytest.skip("no compiled kernels here")
    if stale:
        shutil.copy(Path(native.__file__).parent / sources.library_name(), tmp_path)
        (tmp_path / "one.cpp").write_text("int one;")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    native.announce_once.cache_clear()
    with caplog.at_level("WARNING"):
        assert native.library.__wrapped__() is None
    assert len(caplog.records) == 1
    assert ("older than their sources" if stale else "install a C++17 compiler") in caplog.text


def test_the_library_is_that_of_the_sources_beside_it_and_no_module_to_those_who_walk_the_package():
    assert inspect.getmodulename(sources.library_name()) is None
    assert "kernels" not in [found.name for found in pkgutil.iter_modules(native.__path__)]
    loaded = native.library()
    if loaded is None:
        pytest.skip("no compiled kernels here")
    assert loaded.lade_sources().decode() == sources.digest_of(Path(native.__file__).parent)


def test_free_threaded_python_is_refused(monkeypatch):
    enabled = [True]
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: enabled[-1], raising=False)
    version.refuse_free_threading()
    enabled.append(False)
    with pytest.raises(ImportError, match=r"free-threaded Python.*-X gil=1"):
        version.refuse_free_threading()


FORK = """
import os, threading
import numpy as np
import lade

drafter = lade.EngineDrafter(50, price=0.0)
drafter.begin("a", [1, 2, 3, 4] * 9)
before = drafter.propose(["a"], 4)
child = os.fork()
if child == 0:
    after = []
    threads = [threading.Thread(target=lambda: after.append(drafter.propose(["a"], 4))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0 if after == [before] * 3 and before[0].ids else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_that_forks_after_use_drafts_on_in_threads():
    environment = {**os.environ, "PYTHONPATH": str(Path(native.__file__).parents[2])}
    found = subprocess.check_output([sys.executable, "-c", FORK], text=True, timeout=120, env=environment)
    assert found == "0\n"
