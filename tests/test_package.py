"""What is installed: the old library beside it, types, versions."""

import subprocess
import sys
from pathlib import Path

import pytest


def imported_with(folder: Path) -> str:
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import lade"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr


def test_the_old_library_beside_it_is_pointed_out(tmp_path):
    assert imported_with(tmp_path) == ""
    folder = tmp_path / "lade-0.0.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: lade\nVersion: 0.0.2\n")
    word = imported_with(tmp_path)
    assert "original library lade 0.0.2" in word and "pip uninstall lade && pip install" in word


@pytest.mark.parametrize(
    ("code", "late"),
    [
        ("import lade; lade.LookaheadConfig(budget=3)", {"numpy", "torch", "transformers", "lade.engines"}),
        ("from lade.cli.main import app; app(['--help'], standalone_mode=False)", {"torch", "transformers"}),
    ],
)
def test_what_takes_long_to_import_waits_until_it_is_used(code, late):
    code = f"{code}\nimport sys; print({late} & {{*sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "set()"
