"""What is installed: the old library beside it, types, versions."""

import subprocess
import sys
from pathlib import Path

import lade


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


def test_the_package_is_typed():
    assert (Path(lade.__file__).parent / "py.typed").is_file()


def test_importing_the_package_does_not_load_torch():
    code = "import sys, lade; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
