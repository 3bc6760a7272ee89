"""The Python blocks of README and docs run as they stand, on the embedded model instead of one from a hub."""

import logging
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from made_gguf import written
from transformers import AutoModelForCausalLM, AutoTokenizer

import lade
from lade.embedded import model_path
from lade.recipe import export_recipe

ROOT = Path(__file__).parent.parent
HUB_ID = "Qwen/Qwen3-0.6B"
FRAMEWORKS = {"langchain_huggingface", "lm_eval", "outlines", "smolagents"}
PROMPT = "def fibonacci(n):"
LOADING = "AutoModelForCausalLM.from_pretrained(name)"
"""As the checkpoint has it, which in the embedded one's and most others' is bfloat16."""


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


RUN_ELSEWHERE = {"serve.md", "other-apis.md", "several-devices.md"}
"""Their blocks want a server, or several processes: tests/server and tests/cluster make the same calls."""
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if blocks(page) and page.name not in RUN_ELSEWHERE
]


@pytest.fixture
def names():
    """What the pages take as given: a model in float32, where texts are equal, its tokenizer, and prompts."""
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path())
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    return {"lade": lade, "model": model, "tokenizer": tokenizer, "inputs": inputs, "prompts": [inputs, inputs]}


@pytest.fixture
def undone(monkeypatch, tmp_path):
    """In a folder that has the files the pages name; what they change for the process is as it was afterwards."""
    monkeypatch.setenv("USE_LADE", "0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(lade.pack.__kwdefaults__, "min_weights", 1)  # the embedded model is small
    export_recipe(tmp_path / "recipe")
    written(tmp_path / "model.Q4_K_M.gguf")
    results = tmp_path / "bench-results" / "embedded"
    results.mkdir(parents=True)
    shutil.copy(ROOT / "benchmarks" / "embedded-code" / "results.json", results)
    level, handlers = logging.getLogger("lade").level, list(logging.getLogger().handlers)
    yield
    lade.restore_all()
    logging.getLogger("lade").setLevel(level)
    logging.getLogger().handlers[:] = handlers


@pytest.mark.one_in(4)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_python_blocks_run_in_order(page, names, undone):
    warned = any(LOADING in block for block in blocks(page))
    with pytest.warns(lade.PrecisionWarning) if warned else nullcontext():
        run(page, names)


def run(page: Path, names: dict[str, Any]) -> None:
    for block in blocks(page):
        for package in FRAMEWORKS & set(re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE)):
            pytest.importorskip(package, reason=f"{package} is not installed: make test-frameworks")
        source = block.replace(HUB_ID, str(model_path())).replace("max_new_tokens=100", "max_new_tokens=12")
        exec(compile(source, page.name, "exec"), names)


def test_a_block_that_fails_would_be_noticed(tmp_path, names, undone):
    page = tmp_path / "page.md"
    page.write_text("```python\nlade.generate(model, nothing)\n```\n")
    with pytest.raises(NameError, match="nothing"):
        test_the_python_blocks_run_in_order(page, names, undone)
