"""What is installed: a wheel that runs from another folder, the old library beside it, what is loaded when."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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


@pytest.mark.slow
def test_the_wheel_installs_and_generates_from_an_empty_folder(tmp_path):
    wheels, site, empty, home = (tmp_path / name for name in ("wheels", "site", "empty", "home"))
    empty.mkdir()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(wheels), str(ROOT)], check=True)
    (wheel,) = wheels.glob("lookahead_decoding-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    environment = {"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin", "HOME": str(home)}
    where = [sys.executable, "-c", "import lade; print(lade.__file__)"]
    found = subprocess.run(where, cwd=empty, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.startswith(str(site))
    lade = [sys.executable, "-m", "lade"]
    command = [*lade, "generate", "--prompt", "def add(a, b):", "--max-new-tokens", "9", "--json"]
    run = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["new_tokens"] == 9
    recipe = [*lade, "export-recipe", str(tmp_path / "recipe")]
    subprocess.run(recipe, cwd=empty, env=environment, capture_output=True, check=True)
    written = {str(file.relative_to(tmp_path / "recipe")) for file in (tmp_path / "recipe").rglob("*.*")}
    assert written == {"README.md", "custom_generate/generate.py", "custom_generate/requirements.txt"}
    page = "lade/server/page"
    there, here = (sorted(path.relative_to(root) for path in (root / page).rglob("*.*")) for root in (ROOT, site))
    assert there == here != []
    assert list(empty.iterdir()) == []
