"""The README: its commands exist, its pictures are there, and it stays short. `test_snippets.py` runs its Python."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
TEXT = README.read_text(encoding="utf-8")
MOST_WORDS = 700


def test_it_can_be_read_in_a_few_minutes():
    assert len(TEXT.split()) <= MOST_WORDS


def test_its_counts_of_models_are_those_of_the_list():
    page = (README.parent / "docs" / "models.md").read_text(encoding="utf-8")
    text, images = re.findall(r"^\*\*Served, (\d+) of (\d+)\*\*", page, re.MULTILINE)
    assert f"{text[0]} of {text[1]} text classes and {images[0]} of {images[1]} image classes" in TEXT
