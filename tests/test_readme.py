"""The README: its commands exist, its pictures are there, and it stays short. `test_snippets.py` runs its Python."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
MOST_WORDS = 700


def test_the_commands_it_names_are_there():
    console = "\n".join(re.findall(r"^```console\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE))
    named = re.findall(r"^\$ make (\w+)", console, re.MULTILINE)
    makefile = (README.parent / "Makefile").read_text()
    assert set(named) == {"demo", "test"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_its_pictures_are_there():
    found = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", TEXT)
    assert found and all((README.parent / path).is_file() for path in found)


def test_it_can_be_read_in_a_few_minutes():
    assert len(TEXT.split()) <= MOST_WORDS


def test_its_counts_of_models_are_those_of_the_list():
    page = (README.parent / "docs" / "models.md").read_text(encoding="utf-8")
    text, images = re.findall(r"^\*\*Served, (\d+) of (\d+)\*\*", page, re.MULTILINE)
    assert f"{text[0]} of {text[1]} text classes and {images[0]} of {images[1]} image classes" in TEXT
