"""A benchmark of toys: a tokenizer of single characters, workloads of short texts, models as the bench takes them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lade.testing import toy_model
from lade_lab import results as records
from lade_lab.harness.arms import Models
from lade_lab.workloads import Item, Workload

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
VOCABULARY = 48
FIRST = ord("A")


def experiment(patch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """A program of `lab/experiments`, which is no package."""
    patch.syspath_prepend(EXPERIMENTS)
    return importlib.import_module(name)


class Letters:
    """One token a character, for texts of the characters from A to p."""

    chat_template: str | None = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [(ord(letter) - FIRST) % VOCABULARY for letter in text]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(FIRST + token) for token in ids)

    def get_vocab(self) -> dict[str, int]:
        return {chr(FIRST + token): token for token in range(VOCABULARY)}


class Chatty(Letters):
    """The same with a chat template: U and A before turns, and A for the answer to come."""

    chat_template = "there is one"

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        text = "".join(message["role"][0].upper() + message["content"] for message in messages)
        return self(text + "A")["input_ids"]


def workload(*turns: Sequence[str], name: str = "toys", chat: bool = False) -> Workload:
    """Each argument is one item: its turns."""
    items = [Item(f"p{number}", list(each), chat) for number, each in enumerate(turns)]
    return Workload(records.Workload(name, "jsonl", len(items), None), items)


def models(family: str = "llama", **options: Any) -> Models:
    """A toy, unpacked."""
    model = toy_model(family, vocabulary=VOCABULARY, **options)
    dtype = str(model.dtype).removeprefix("torch.")
    return Models(records.Model("toy", family, model.num_parameters(), dtype), model)
