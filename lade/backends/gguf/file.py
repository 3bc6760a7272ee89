"""Which paths are GGUF files."""

from __future__ import annotations

from pathlib import Path

SUFFIX = ".gguf"


def gguf_file(path: Path) -> Path | None:
    """Return a GGUF file by its path, or by that of a folder with exactly one and no config.json; None if it is none."""
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob(f"*{SUFFIX}"))
        return files[0] if len(files) == 1 else None
    return path if path.is_file() and path.suffix == SUFFIX else None
