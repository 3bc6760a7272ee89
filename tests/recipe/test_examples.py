"""The programs of `examples/` run, on the embedded model and offline, and say that the texts are equal."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = [path for path in EXAMPLES if path.stem.startswith("with_")]
PAGE = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


def missing(path: Path) -> list[str]:
    """What a program imports and is not installed."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)]
    imports += [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    names = {name.partition(".")[0] for name in imports} - {"comparison"}
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore", "error::lade.errors.FallbackWarning")
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_gives_plains_text(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if absent := missing(path):
        pytest.skip(f"{', '.join(absent)} is not installed: make test-frameworks")
    monkeypatch.setattr(sys, "argv", [str(path)])
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.delitem(sys.modules, "comparison", raising=False)
    source = path.read_text(encoding="utf-8").replace("120", "30")
    exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "The text is the same as that of plain generate." in printed
    assert re.search(r"\d+\.\d\d s plainly, \d+\.\d\d s with lookahead: \d+\.\d\d times the speed", printed)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_program_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < 40


def test_the_index_has_every_program_and_the_versions_tried() -> None:
    listed = re.findall(r"^\| `python examples/(\w+\.py)` \|.*\| ([\w-]+) ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert sorted(name for name, *_ in listed) == [path.name for path in PROGRAMS]
    pins = [(ROOT / name).read_text(encoding="utf-8") for name in ("constraints.txt", "constraints-frameworks.txt")]
    for _, package, version in listed:
        assert re.search(rf"^{package}=={re.escape(version)}$", "\n".join(pins), re.MULTILINE), package


def test_links_of_the_index_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(links) >= 2 and all((ROOT / "examples" / link).exists() for link in links)
