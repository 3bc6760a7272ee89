"""The programs of `lab/experiments` import, so that a renamed module does not break them unseen."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "experiments"
NOT_INSTALLED = {"write_gguf": "gguf"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_imports_and_says_how_it_is_called(path, monkeypatch):
    if path.stem in NOT_INSTALLED:
        pytest.importorskip(NOT_INSTALLED[path.stem])
    monkeypatch.syspath_prepend(FOLDER)
    program = importlib.import_module(path.stem)
    assert f"python lab/experiments/{path.name}" in program.__doc__
