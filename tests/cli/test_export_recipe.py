"""`lade export-recipe DIR`."""

import re

import pytest

from lade.recipe import CARD, CODE, MARK, recipe_path

FILES = sorted((*CODE, CARD))


def files(folder):
    found = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_text() for name, file in found.items() if "__pycache__" not in name}


def test_what_is_written_is_what_the_package_holds(lade, tmp_path):
    target = tmp_path / "deep" / "recipe"
    result = lade("export-recipe", target)
    assert result.exit_code == 0, result.output
    assert files(target) == files(recipe_path()) and sorted(files(target)) == FILES
    assert all(MARK in text for text in files(target).values())
    assert all(f"wrote {target / name}" in result.stderr for name in FILES)
    assert f"custom_generate='{target}', trust_remote_code=True" in result.stderr


def test_an_earlier_recipe_is_replaced(lade, tmp_path):
    lade("export-recipe", tmp_path)
    (tmp_path / CODE[0]).write_text(f'"""An older one. {MARK}."""\n')
    (tmp_path / CARD).unlink()
    (tmp_path / ".gitattributes").write_text("of a hub\n")
    assert lade("export-recipe", tmp_path).exit_code == 0
    assert files(tmp_path) == {**files(recipe_path()), ".gitattributes": "of a hub\n"}


@pytest.mark.parametrize("name", ["notes.txt", CARD, *CODE])
def test_a_folder_of_something_else_is_refused_and_left_as_it_is(lade, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine\n")
    result = lade("export-recipe", tmp_path)
    assert result.exit_code == 2
    assert f"{tmp_path / name} is not part of a recipe: give another folder, or give --force" in result.stderr
    assert files(tmp_path) == {name: "mine\n"}


def test_force_adds_it_to_a_model_and_touches_nothing_else(lade, tmp_path):
    own = {"config.json": "{}", CARD: "# My model\n", "custom_generate/beside.py": "x = 1\n"}
    (tmp_path / "custom_generate").mkdir()
    for name, text in {**own, CODE[0]: "another recipe\n"}.items():
        (tmp_path / name).write_text(text)
    result = lade("export-recipe", tmp_path, "--force")
    assert result.exit_code == 0 and f"from_pretrained('{tmp_path}', trust_remote_code=True)" in result.stderr
    written = {name: files(recipe_path())[name] for name in CODE}
    assert files(tmp_path) == {**written, **own}
    (tmp_path / CARD).unlink()
    assert lade("export-recipe", tmp_path, "--force").exit_code == 0
    assert CARD not in files(tmp_path), "a model without a card gets none"


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_path_that_is_no_folder_is_one_line(lade, tmp_path, force):
    file = tmp_path / "file"
    file.write_text("mine\n")
    result = lade("export-recipe", file, *force)
    assert result.exit_code == 2 and file.read_text() == "mine\n"
    assert re.match(rf"error: cannot write {re.escape(str(file))}.*: \w[\w ]+\n$", result.stderr), result.stderr
