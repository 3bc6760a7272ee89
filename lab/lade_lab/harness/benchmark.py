"""Set-up of a benchmark: environment, methods, resumption of an earlier run."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lade.errors import InputError
from lade.tuning.cost_cache import devices_of
from lade.version import __version__
from lade_lab import results as records
from lade_lab.harness import methods as known
from lade_lab.harness.arms import Models, arms_for
from lade_lab.harness.experiment import Experiment
from lade_lab.harness.methods import check_settings, check_workloads
from lade_lab.results import Environment, Method, Results, Settings
from lade_lab.terms import require_same
from lade_lab.workloads import Workload

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


RESULTS = "results.json"


def prepare(
    models: Models,
    tokenizer: Any,
    workloads: Sequence[Workload],
    methods: Sequence[Method],
    settings: Settings,
    *,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    command: Sequence[str] = (),
) -> Experiment:
    """An experiment, checked and not begun.

    Args:
        models: what answers.
        tokenizer: of the models.
        workloads: the prompts.
        methods: see `lade_lab.harness.methods.parse_all`.
        settings: how answers are made.
        folder: for results.json, made if need be; None: an interrupted run cannot be resumed.
        resume: continue what is in the folder.
        command: for the record.

    Raises:
        ConfigError, InputError: a setting, a prompt, or what is in the folder does not allow it.
    """
    check_settings(settings)
    check_workloads(workloads)
    arms = arms_for(methods, models, settings)
    results = Results(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(command),
        environment=environment_of(models.packed or models.plain),
        model=models.record,
        settings=settings,
        workloads=[workload.record for workload in workloads],
        methods=[arm.method for arm in arms],
        reference=known.reference_of(methods).name,
    )
    if folder is None:
        return Experiment(arms, workloads, models, tokenizer, results)
    path = _ready(Path(folder), resume=resume) / RESULTS
    if resume and path.exists():
        results = _taken_over(Results.load(path), results, path)
    return Experiment(arms, workloads, models, tokenizer, results, path)


def _record_of(model: PreTrainedModel, name: str, draft: PreTrainedModel | None) -> records.Model:
    return records.Model(
        name=name or _name_of(model),
        kind=model.config.model_type,
        parameters=model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
        draft=None if draft is None else _name_of(draft),
    )


def _name_of(model: PreTrainedModel) -> str:
    return str(model.config.name_or_path or type(model).__name__)


def run(
    model: PreTrainedModel,
    tokenizer: Any,
    workloads: Sequence[Workload],
    methods: Sequence[str] = known.DEFAULT,
    settings: Settings | None = None,
    *,
    packed: PreTrainedModel | None = None,
    draft: PreTrainedModel | None = None,
    name: str = "",
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
) -> Results:
    """Compare methods on prompts, as `lade bench` does; outputs are compared before speeds are of interest.

    >>> workload = lade.bench.workloads.load("builtin", limit=5)
    >>> results = lade.bench.run(model, tokenizer, [workload], ["hf", "plain", "adaptive"])
    >>> results.mismatches
    []

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer.
        workloads: the prompts.
        methods: such as `hf` or `lookahead=15,5,15`.
        settings: how answers are made; None: 128 new tokens, greedily.
        packed: a copy of the model after `lade.pack`, for this library's methods; None: they run on `model` too.
        draft: the model that `hf-assisted` drafts with.
        name: of the model, for the record.
        folder: for results.json, which is written after each prompt; None: nothing is written.
        resume: continue what is in the folder.

    Returns:
        The results, complete. A run that is interrupted leaves an incomplete results.json.

    Raises:
        ConfigError, InputError: an argument is not valid, or a prompt cannot be continued.
        UnsupportedError: a method cannot be run with this model.
    """
    settings = settings or Settings(max_new_tokens=128)
    kinds = known.parse_all(methods, sampling=settings.temperature is not None, draft=draft is not None)
    models = Models(_record_of(model, name, draft), model, packed, draft)
    experiment = prepare(
        models, tokenizer, workloads, kinds, settings, folder=folder, resume=resume, command=sys.argv[:1]
    )
    experiment.warm_up()
    for _ in experiment:
        pass
    return experiment.results


def check_folder(folder: Path, *, resume: bool) -> None:
    """Raise `InputError` for a folder that has results already, which a new run would mix with its own."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{str(folder)!r} is a file: give a folder as --out")
    if not resume and (folder / RESULTS).exists():
        raise InputError(f"{str(folder)!r} already has results: continue with --resume, or give another --out")


def _ready(folder: Path, *, resume: bool) -> Path:
    """The folder, made if need be."""
    check_folder(folder, resume=resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"folder {str(folder)!r} cannot be created ({problem}): give another --out") from problem
    if not os.access(folder, os.W_OK):
        raise InputError(f"folder {str(folder)!r} cannot be written to: give another --out")
    return folder


def _taken_over(earlier: Results, now: Results, path: Path) -> Results:
    """Return the earlier run's results as incomplete; raises `InputError` if its settings differ."""
    require_same(_terms(earlier), _terms(now), repr(str(path)))
    return replace(earlier, complete=False)


def _terms(results: Results) -> dict[str, Any]:
    """Return the settings that must agree when a run is resumed."""
    return {
        "model": asdict(results.model),
        "settings": asdict(results.settings),
        "workloads": [asdict(workload) for workload in results.workloads],
        "methods": [asdict(method) for method in results.methods],
        "environment": asdict(results.environment),
        "reference": results.reference,
    }
