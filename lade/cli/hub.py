"""Where the name of a model leads: to a folder, to the hub, or to the embedded one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lade.cli.model_options import EMBEDDED, Loading
from lade.cli.terminal import one_line
from lade.errors import ConfigError, InputError

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Source:
    """What `from_pretrained` loads.

    Attributes:
        shown: what the user calls it.
        name: a folder or a hub id.
        local: whether to keep off the network.
    """

    shown: str
    name: str
    local: bool


def find(loading: Loading) -> Source:
    """Where to load a model from.

    Raises:
        ConfigError, InputError: there is no such folder, or the hub does not have it, or cannot be reached.
    """
    name = loading.model
    if name is None:
        from lade.demo.embedded import model_path

        return Source(EMBEDDED, str(model_path()), local=True)
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not any((folder / file).is_file() for file in ("config.json", "adapter_config.json")):
            raise InputError(f"model folder {name!r} has no config.json: give a folder that save_pretrained wrote")
        if loading.revision is not None:
            raise ConfigError("revision", loading.revision, f"the folder {name!r} has no revisions: leave it out")
        return Source(name, str(folder), local=True)
    if folder.exists():
        raise InputError(f"model {name!r} is a file: give the folder it lies in")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise InputError(f"model folder {name!r} does not exist: check the path, or give a hub id such as org/name")
    if loading.local_files_only and not _cached(name, loading):
        raise InputError(f"model {name!r} has not been downloaded yet: leave out --local-files-only")
    return Source(name, name, local=loading.local_files_only or _only_cached(name, loading))


def _cached(name: str, loading: Loading) -> bool:
    """Whether there is a copy, as far as its configuration tells."""
    found = try_to_load_from_cache(name, "config.json", cache_dir=loading.cache_dir, revision=loading.revision)
    return isinstance(found, str)


def _only_cached(name: str, loading: Loading) -> bool:
    """Ask the hub once, without the retries of a download; where it cannot be reached, a cached copy will do."""
    revision = loading.revision
    try:
        HfApi(token=loading.token).model_info(name, revision=revision, timeout=_TIMEOUT_S)
    except GatedRepoError as problem:  # a kind of RepositoryNotFoundError
        raise InputError(gated(name)) from problem
    except RevisionNotFoundError as problem:
        remedy = f"{name!r} has no such branch, tag or commit: give one that it has, or leave it out"
        raise ConfigError("revision", revision, remedy) from problem
    except (RepositoryNotFoundError, HFValidationError) as problem:
        raise InputError(f"model {name!r} is neither a folder here nor a model on the hub: check the name") from problem
    except Exception as problem:
        if _cached(name, loading):
            return True
        raise InputError(
            f"model {name!r} is no folder here, and the hub cannot be reached ({one_line(problem, 120)}): "
            "check the network, or give a folder"
        ) from problem
    return False


def gated(name: str) -> str:
    """What to do about a model that one has to ask for."""
    return f"model {name!r} is gated on the hub: accept its terms there, then log in with hf auth login, or add --token"
