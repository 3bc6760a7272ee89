"""The README's Python runs as it stands, on the embedded model instead of one from a hub."""

import re
from pathlib import Path

import lade
from lade.demo.embedded import model_path

README = Path(__file__).parent.parent / "README.md"
HUB_ID = "Qwen/Qwen3-0.6B"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_python_blocks_run_in_order(capsys, monkeypatch):
    monkeypatch.delenv("USE_LADE", raising=False)
    monkeypatch.setenv("USE_LADE", "0")  # so that the block's own setting is undone afterwards
    found = blocks("python")
    assert len(found) >= 5 and HUB_ID in found[0]
    namespace: dict[str, object] = {}
    try:
        for block in found:
            source = block.replace(HUB_ID, str(model_path())).replace("max_new_tokens=100", "max_new_tokens=24")
            exec(compile(source, "README.md", "exec"), namespace)
    finally:
        lade.restore_all()
    printed = capsys.readouterr().out
    assert "tokens per step" in printed and "def fibonacci(n):" in printed


def test_the_commands_it_names_are_there():
    named = re.findall(r"^\$ make (\w+)", "\n".join(blocks("console")), re.MULTILINE)
    makefile = (README.parent / "Makefile").read_text()
    assert set(named) == {"demo", "test"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_its_pictures_are_there():
    for path in re.findall(r'(?:src|srcset)="([^"]+)"', README.read_text(encoding="utf-8")):
        assert (README.parent / path).is_file(), path
