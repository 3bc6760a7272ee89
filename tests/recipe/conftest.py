"""Fixtures of the recipe's tests: a folder for transformers' copies of it, a model, a text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend import own_modules
from transformers import AutoModelForCausalLM, AutoTokenizer

from lade.embedded import model_path, prompts


@pytest.fixture(scope="session", autouse=True)
def modules_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """transformers copies a recipe before it runs it, but not into the user's cache folder here."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        own_modules(patch, folder)
        yield folder


@pytest.fixture(scope="session")
def folder() -> str:
    """The embedded model, as frameworks want it: by name."""
    return str(model_path())


@pytest.fixture(scope="session")
def model(folder: str) -> Any:
    """The embedded model in float32, where texts are equal."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def tokenizer(folder: str) -> Any:
    return AutoTokenizer.from_pretrained(folder, padding_side="left")


@pytest.fixture
def text() -> str:
    return prompts()[0]
