"""The tables of models.md that a script writes: what came of every class of transformers."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch
import transformers

from lade.model.supports import MASK_PER_LAYER_TYPE, ONE_MASK, RECURRENT

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    spec = importlib.util.spec_from_file_location("list_models", ROOT / "scripts" / "list_models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(script):
    return PAGE.partition(script.BEGIN)[2].partition(script.END)[0].strip()


def sections(script):
    """Those of text and of images."""
    return re.split(r"^### ", written(script), flags=re.MULTILINE)[1:]


def found(section):
    """Which types a section of the page calls served, and what it says of the others."""
    served = set(re.findall(r"`([^`]+)`", re.search(r"^\*\*Served.*$", section, re.MULTILINE)[0]))
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)[1:]
    return served, {name: reason for names, reason in rows for name in re.findall(r"`([^`]+)`", names)}


@pytest.fixture
def current(script):
    """The script, where the page is of this transformers."""
    if not written(script).startswith(f"transformers {transformers.__version__},"):
        pytest.skip("the page is of another transformers")
    return script


def test_the_page_and_the_tables_of_the_code_agree(script):
    """What is listed is served, wherever it could be built; nothing parts from plain decoding."""
    text, images = map(found, sections(script))
    listed = MASK_PER_LAYER_TYPE | ONE_MASK | RECURRENT
    assert text[0] | text[1].keys() | {"gemma4_unified_text"} >= listed
    for name in listed & text[1].keys():
        assert text[1][name].startswith("not ") or name == "falcon", name
    for served, others in (text, images):
        assert len(served) >= 40 and not served & others.keys()
        assert script.DIFFERS not in others.values()


@pytest.mark.slow
def test_the_page_has_every_class(current):
    for section, mapping in zip(sections(current), current.MAPPINGS.values(), strict=True):
        served, others = found(section)
        assert served | others.keys() == {model_type for model_type, _, _ in current.classes(mapping)}


@pytest.mark.slow
def test_an_outcome_is_what_came_of_it(script, monkeypatch):
    """Served, refused, not built and different are told apart."""
    (llama,) = [rest for name, *rest in script.classes(script.MAPPINGS["Text"]) if name == "llama"]
    (mamba,) = [rest for name, *rest in script.classes(script.MAPPINGS["Text"]) if name == "mamba"]
    assert script.outcome(*llama) == script.SERVED
    monkeypatch.setattr(script.lade, "generate", lambda *_, **__: torch.zeros(1, 24, dtype=torch.long))
    assert script.outcome(*llama) == script.DIFFERS
    assert script.outcome(mamba[0], llama[1]).startswith(script.NOT_BUILT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_is_what_the_script_writes(current):
    assert current.tables().splitlines()[1:] == written(current).splitlines()[1:], "run python scripts/list_models.py"
