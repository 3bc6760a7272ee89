"""What a benchmark runs on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lade.bench.results import Environment
from lade.tuning.cost_key import devices_of
from lade.version import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def environment_of(model: PreTrainedModel) -> Environment:
    """Device, threads, versions and commit, as they are now."""
    return Environment(
        device="; ".join(devices_of(model)),
        threads=torch.get_num_threads(),
        versions=_versions(),
        platform=f"{platform.system()} {platform.machine()}",
        commit=commit_of(Path(__file__).parents[3]),
    )


def command_line(words: Sequence[str]) -> list[str]:
    """A command line for the record: of paths only the names, since where they lie says nothing to others."""
    return [_without_folders(word) for word in words]


def _without_folders(word: str) -> str:
    option, sign, value = word.partition("=")
    if sign and option.startswith("-"):
        return f"{option}={_without_folders(value)}"
    path = Path(word)
    elsewhere = path.is_absolute() or word.startswith(("~", f"..{os.sep}"))
    return path.name if path.name and (elsewhere or (os.sep in word and path.exists())) else word


def commit_of(checkout: Path) -> str | None:
    """The commit of a checkout, with "+" after it if files have changed; None if it is none, or git is not there."""
    if not (checkout / ".git").exists():
        return None
    commit = _git(checkout, "rev-parse", "--short=12", "HEAD")
    changed = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else commit + ("+" if changed else "")


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "lookahead-decoding": __version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None and torch.cuda.is_available():
        found["cuda"] = torch.version.cuda
    return found
