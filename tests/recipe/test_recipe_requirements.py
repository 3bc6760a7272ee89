"""A recipe without its package, or with an old one: the error has the command that helps, and not a wrong one."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers.dynamic_module_utils import get_imports

from lade.recipe.export import CARD, CODE, recipe_path
from lade.recipe.folder.custom_generate import generate
from lade.testing import toy_model
from lade.version import __version__

INSTALL = 'pip install --upgrade "lookahead-decoding>=0.1"'
PROMPT = torch.tensor([[1, 2, 3]])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make another version of this package seem to be installed; None: none."""
    real = importlib.metadata.version

    def pretend(version: str | None) -> None:
        def found(name: str) -> str:
            if name != "lookahead-decoding":
                return real(name)
            if version is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(importlib.metadata, "version", found)

    return pretend


@pytest.mark.parametrize("version", [None, "0.0.9"])
@pytest.mark.parametrize("importable", [True, False])
def test_transformers_names_the_command(
    recipe: dict[str, Any], installed: Any, version: str | None, importable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(version)
    if not importable:
        monkeypatch.setitem(sys.modules, "lade", None)
    with pytest.raises(ImportError) as caught:
        toy_model().generate(PROMPT, max_new_tokens=3, **recipe)
    assert f"run: {INSTALL} (installed: {version})" in str(caught.value)
    assert "pip install lade" not in str(caught.value), "that is the original library"


def test_the_recipe_names_the_command_where_nothing_has_checked(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody copies `generate.py` alone; or another package is imported by that name."""
    monkeypatch.setitem(sys.modules, "lade.recipe.generate", None)
    with pytest.raises(ImportError, match=re.escape("needs lookahead-decoding 0.1 or later (import of")) as caught:
        toy_model().generate(PROMPT, max_new_tokens=3, **recipe)
    assert str(caught.value).endswith(f": run  {INSTALL}")


def test_the_versions_named_are_one_and_met() -> None:
    assert generate.PACKAGE == "lookahead-decoding" and INSTALL == generate.INSTALL
    for name in (CODE[1], CARD):
        named = re.findall(r"lookahead-decoding>=(\d[\d.]*\d)", (recipe_path() / name).read_text())
        assert named and set(named) == {generate.VERSION}, name
    assert Version(generate.VERSION) <= Version(__version__)


def test_transformers_sees_no_import_that_it_would_ask_for_by_name() -> None:
    assert get_imports(recipe_path() / CODE[0]) == ["typing"]
