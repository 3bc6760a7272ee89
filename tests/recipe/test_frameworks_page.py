"""docs/frameworks.md: its Python runs as it stands, and its versions are those of `make test-frameworks`."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from lade.recipe import export_recipe, recipe_path

ROOT = Path(__file__).parent.parent.parent
PAGES = {"docs/frameworks.md": ROOT / "docs" / "frameworks.md", "the card": recipe_path() / "README.md"}
PINS = "\n".join((ROOT / name).read_text() for name in ("constraints.txt", "constraints-frameworks.txt"))
PACKAGES = {"transformers pipelines": "transformers", "transformers serve": "transformers", "PEFT": "peft"}
PACKAGES |= {"LangChain": "langchain-huggingface", "smolagents": "smolagents", "lm-eval": "lm-eval"}
PACKAGES |= {"Outlines": "outlines"}


def blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def runnable(source: str) -> bool:
    """Whether all that it imports is installed."""
    modules = re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE)
    return all(importlib.util.find_spec(module) for module in modules)


# Deprecations of the frameworks are not ours, and the embedded model is loaded in 16 bits, as a program would.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore", "error::lade.errors.FallbackWarning")
@pytest.mark.parametrize("page", PAGES)
def test_its_python_runs_in_order(page: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    export_recipe(Path("recipe"))
    text = PAGES[page].read_text(encoding="utf-8")
    assert len(blocks(text)) >= 3
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(text):
        if not runnable(block):
            continue
        source = block.replace("Qwen/Qwen3-0.6B", folder).replace("RECIPE", "./recipe")
        exec(compile(re.sub(r"(max_new_tokens\W+)100", r"\g<1>20", source), page, "exec"), namespace)
    assert namespace["output"].shape[1] == namespace["inputs"]["input_ids"].shape[1] + 20
    if page == "the card":
        assert namespace["stats"].new_tokens == 20


def test_the_versions_are_those_tried() -> None:
    table = re.findall(r"^\| ([\w -]+) \| (\d[\d.]+) \|", PAGES["docs/frameworks.md"].read_text(), re.MULTILINE)
    assert {name for name, _ in table} == PACKAGES.keys()
    for name, version in table:
        assert f"\n{PACKAGES[name]}=={version}\n" in f"\n{PINS}", name
