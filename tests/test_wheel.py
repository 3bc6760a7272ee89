"""The wheel: installs into an empty folder and runs from another one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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
