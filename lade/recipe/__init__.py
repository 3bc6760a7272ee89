"""The recipe: a folder with which transformers itself, and whatever is built on it, decodes with lookahead.

`model.generate(custom_generate=FOLDER, trust_remote_code=True)` runs `FOLDER/custom_generate/generate.py`, which is as
short as it can be, so that it can be read before it is trusted: all it does is call `lade.recipe.generate.generate`.
That function stays where it is, for recipes that were written out by an earlier version.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from lade.errors import InputError

CARD = "README.md"
CODE = ("custom_generate/generate.py", "custom_generate/requirements.txt")
MARK = "Written by `lade export-recipe`"


def recipe_path() -> Path:
    """The recipe as it lies in the package: good for `custom_generate=` as it is."""
    return Path(str(resources.files("lade.recipe") / "folder"))


def export_recipe(folder: Path, *, force: bool = False) -> list[Path]:
    """Write the recipe to a folder, which is made if it is not there; an earlier recipe in it is replaced.

    With `force` it is added to a folder that holds other files, such as a model, and replaces another recipe there. No
    file outside `custom_generate/` is touched then. Returns the files written.

    Raises:
        InputError: the folder holds other files and `force` is not given, or it cannot be written.
    """
    try:
        foreign = _foreign(folder)
        if foreign is not None and not force:
            raise InputError(
                f"{foreign} is not part of a recipe: give another folder, or give --force to add it to this one"
            )
        return [_write(folder, name) for name in (CODE if foreign is not None else (*CODE, CARD))]
    except OSError as problem:
        raise InputError(f"cannot write {problem.filename or folder}: {problem.strerror}") from None


def _foreign(folder: Path) -> Path | None:
    """Something in the folder that is not of a recipe; None if there is nothing. Hidden files do not count."""
    entries = [entry for entry in sorted(folder.glob("*")) if not entry.name.startswith(".")]
    entries = [entry for entry in entries if entry != (folder / CODE[0]).parent]
    entries += [folder / name for name in CODE if (folder / name).exists()]
    ours = {folder / name for name in (*CODE, CARD)}
    return next((entry for entry in entries if entry not in ours or not _is_ours(entry)), None)


def _is_ours(file: Path) -> bool:
    return file.is_file() and MARK in file.read_text(encoding="utf-8", errors="replace")


def _write(folder: Path, name: str) -> Path:
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes((recipe_path() / name).read_bytes())
    return target
