"""Every role of the table is declared once, and played by what the table says."""

from importlib import import_module

import pytest

from lade.model.registry import PLAYED_BY, Role

DECLARED_IN = [
    *(f"lade.model.{name}" for name in ("facts", "inputs", "prepared", "prefill", "runner", "supports")),
    "lade.grammar",
    "lade.backends.cpu.invariant_marker",
]


def roles():
    things = {name: thing for module in DECLARED_IN for name, thing in vars(import_module(module)).items()}
    return {name: thing for name, thing in things.items() if isinstance(thing, Role)}


def test_every_role_of_the_table_is_declared_once():
    assert sorted(role.name for role in set(roles().values())) == sorted(PLAYED_BY)


@pytest.mark.parametrize("name", sorted(roles()))
def test_a_role_is_played_by_the_module_of_the_table(name):
    role = roles()[name]
    player = role.load()
    assert type(player).__module__ == f"lade.backends.{PLAYED_BY[role.name]}" and role.loaded() is player


def test_a_role_that_its_module_does_not_fill_is_an_error():
    with pytest.raises(AssertionError, match="does not fill its role"):
        Role("trials").load()


def test_a_backend_that_is_not_imported_is_not_loaded(monkeypatch):
    monkeypatch.delitem(__import__("sys").modules, "lade.backends.media", raising=False)
    assert Role("media").loaded() is None
