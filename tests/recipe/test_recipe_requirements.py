"""A recipe without its package, or with an old one: the error has the command that helps, and not a wrong one."""

from __future__ import annotations

import importlib.metadata
import re
import sys

import pytest
import torch
from accelerating import RECIPE
from packaging.version import Version

from lade.recipe import CARD, CODE, recipe_path
from lade.recipe.folder.custom_generate import generate
from lade.testing import toy_model
from lade.version import __version__

INSTALL = "pip install --upgrade .  in a checkout of lookahead-decoding"
PROMPT = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize("version", [None, "0.0.9"])
def test_transformers_names_the_command(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def found(name: str) -> str:
        if name == "lookahead-decoding" and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version or "" if name == "lookahead-decoding" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", found)
    if version is None:
        monkeypatch.setitem(sys.modules, "lade", None)
    with pytest.raises(ImportError) as caught:
        toy_model().generate(PROMPT, max_new_tokens=3, **RECIPE)
    assert f"run: {INSTALL} (installed: {version})" in str(caught.value)
    assert "pip install lade" not in str(caught.value), "that is the original library"


def test_the_versions_named_are_one_and_met() -> None:
    assert generate.PACKAGE == "lookahead-decoding" and INSTALL == generate.INSTALL
    for name in (CODE[1], CARD):
        named = re.findall(r"lookahead-decoding>=(\d[\d.]*\d)", (recipe_path() / name).read_text())
        assert named and set(named) == {generate.VERSION}, name
    assert Version(generate.VERSION) <= Version(__version__)
