"""Resolution of model names to a folder, the hub, or the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils import logging as _logging

from lade.backends.cpu.packing.gguf_file import gguf_file
from lade.cli.options.model import EMBEDDED, Loading, folder_of
from lade.cli.terminal import Terminal, one_line
from lade.errors import ConfigError, InputError

_SILENT = 50  # logging.CRITICAL


@contextmanager
def downloading(term: Terminal) -> Iterator[None]:
    """Show the hub's download bars and transformers' loading bars, and suspend the status line."""
    logging: Any = _logging  # untyped
    term.suspend_status(True)
    logging.enable_progress_bar()
    try:
        yield
    finally:
        logging.disable_progress_bar()
        term.suspend_status(False)


@contextmanager
def quiet() -> Iterator[None]:
    """Switch off transformers' progress bars and advice, and restore them afterwards."""
    logging: Any = _logging  # untyped
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(_SILENT)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


_TIMEOUT_S = 5.0
_HUB_ID = re.compile(r"(?!\.)[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class ModelSource:
    """Arguments of `from_pretrained` for a model.

    Attributes:
        shown: name as the user gave it.
        name: path of a folder, or hub id.
        local: do not access the network.
        download: the weights have yet to be downloaded.
        is_gguf: the name is the path of a GGUF file.
    """

    shown: str
    name: str
    local: bool
    download: bool = False
    is_gguf: bool = False


def find(loading: Loading) -> ModelSource:
    """Return where to load a model from.

    Raises:
        ConfigError, InputError: the folder does not exist, or the hub lacks the model or cannot be reached.
    """
    name = loading.model
    if name is None:
        from lade.embedded.files import model_path

        return ModelSource(EMBEDDED, str(model_path()), local=True)
    folder = folder_of(name)
    if (file := gguf_file(folder)) is not None:
        if loading.revision is not None:
            raise ConfigError("revision", loading.revision, f"the file {str(file)!r} has no revisions")
        return ModelSource(name, str(file), local=True, is_gguf=True)
    if folder.is_dir():
        if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise InputError(f"model folder {name!r} has no config.json: give a folder that save_pretrained wrote")
        if loading.revision is not None:
            raise ConfigError("revision", loading.revision, f"the folder {name!r} has no revisions")
        return ModelSource(name, str(folder), local=True)
    if folder.exists():
        raise InputError(f"model {name!r} is a file, and not a .gguf: give its folder")
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"model folder {name!r} does not exist: check the path, or give a hub id such as org/name")
    if loading.local_files_only:
        if _cached("config.json", loading) is None:
            raise InputError(f"model {name!r} has not been downloaded yet: leave out --local-files-only")
        return ModelSource(name, name, local=True)
    commit = _commit(loading)
    return ModelSource(
        name, name, local=commit is None, download=commit is not None and not _has_weights(loading, commit)
    )


def find_adapter(loading: Loading) -> ModelSource:
    """Return where to load the adapter from; errors as in `find`."""
    name = loading.adapter or ""
    folder = folder_of(name)
    if folder.is_dir():
        return ModelSource(name, str(folder), local=True)
    if folder.exists() or not _HUB_ID.fullmatch(name):
        raise ConfigError("adapter", name, "no such folder: check the path, or give a hub id such as org/name")
    if loading.local_files_only:
        return ModelSource(name, name, local=True)
    return ModelSource(name, name, local=_commit(loading.for_model(name), file="adapter_config.json") is None)


def _cached(file: str, loading: Loading, commit: str | None = None) -> Path | None:
    """Return the cached copy of a file of the model; None without one."""
    revision = commit or loading.revision
    found = try_to_load_from_cache(loading.name, file, cache_dir=loading.cache_dir, revision=revision)
    return Path(found) if isinstance(found, str) else None


def _has_weights(loading: Loading, commit: str) -> bool:
    """Return True if all weights of a commit are cached."""
    index = _cached("model.safetensors.index.json", loading, commit)
    files = ["model.safetensors"]
    if index is not None:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return all(_cached(file, loading, commit) is not None for file in files)


def _commit(loading: Loading, file: str = "config.json") -> str | None:
    """Return the commit on the hub, asked once without retries; None if only a cached copy with `file` is left."""
    name, revision = loading.name, loading.revision
    try:
        commit: str = HfApi(token=loading.token).model_info(name, revision=revision, timeout=_TIMEOUT_S).sha or ""
    except GatedRepoError as problem:  # a subclass of RepositoryNotFoundError
        raise InputError(gated(name)) from problem
    except RevisionNotFoundError as problem:
        remedy = f"{name!r} has no such branch, tag or commit"
        raise ConfigError("revision", revision, remedy) from problem
    except (RepositoryNotFoundError, HFValidationError) as problem:
        raise InputError(f"model {name!r} is neither a folder here nor a model on the hub: check the name") from problem
    except Exception as problem:
        if _cached(file, loading) is not None:
            return None
        raise InputError(
            f"model {name!r} is not a folder here, and the hub cannot be reached ({one_line(problem, 120)}): "
            "check the network, or give a folder"
        ) from problem
    return commit


def gated(name: str) -> str:
    """Return the message for a gated model."""
    return f"model {name!r} is gated on the hub: accept its terms there, then log in with hf auth login, or add --token"
