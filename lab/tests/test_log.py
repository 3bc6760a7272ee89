"""The lab log: verdicts first, links that lead somewhere, commands that exist or are marked as older ones."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOG = ROOT / "lab" / "log"
TOPICS = sorted(path for path in LOG.glob("*.md") if path.name != "README.md")
VERDICT = re.compile(r"\d{4}-\d\d-\d\d\. \*\*[^*\n]{20,250}[.)]\*\*")


def entries(text: str) -> dict[str, str]:
    """Return the body of each entry by its heading."""
    return dict(re.findall(r"^## ([^\n]*)\n\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))


def without_verdict(text: str) -> list[str]:
    return [head for head, body in entries(text).items() if not VERDICT.match(body)]


def dead_commands(text: str) -> list[str]:
    """Return the scripts in commands that do not exist and are not marked "(at that commit"."""
    joined = text.replace("\\\n", " ")
    found = re.finditer(r"^.*python ((?:scripts|benchmarks|lab)/[\w/]+\.py).*$", joined, re.MULTILINE)
    return [line[1] for line in found if "(at that commit" not in line[0] and not (ROOT / line[1]).is_file()]


@pytest.mark.parametrize("path", TOPICS, ids=lambda path: path.stem)
def test_every_entry_begins_with_its_verdict(path):
    text = path.read_text(encoding="utf-8")
    assert entries(text) and without_verdict(text) == []
    assert len(entries(text)) == len(re.findall(r"^## ", text, re.MULTILINE)), "two entries of one name"


@pytest.mark.parametrize("path", [*TOPICS, LOG / "README.md"], ids=lambda path: path.stem)
def test_links_and_commands_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    assert [link for link in links if not (LOG / link).resolve().is_file()] == []
    assert dead_commands(text) == []


def test_the_index_has_every_topic_and_counts_its_entries():
    index = (LOG / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| \[.*\]\((.*)\) \|.*\| (\d+) \|$", index, re.MULTILINE))
    assert listed == {path.name: str(len(entries(path.read_text(encoding="utf-8")))) for path in TOPICS}


def test_a_missing_verdict_and_a_dead_command_would_be_noticed():
    assert without_verdict("## A\n\n2026-01-02. Text first, **the verdict later, where nobody looks.**\n") == ["A"]
    text = "    python scripts/none.py --x\n    python scripts/gone.py \\\n        --y  # (at that commit: 0123abc)\n"
    assert dead_commands(text) == ["scripts/none.py"]
