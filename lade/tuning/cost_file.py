"""Saved step costs: one small JSON file for each combination of machine, model and versions.

    <user's cache folder>/lookahead-decoding/step-cost/<hash of the key>.json    {"key": {...}, "cost": {...}}

It is only a cache: a file that is damaged, foreign or too old is as good as none, and a folder that cannot be written
to costs a second at the next start. So none of this is an error; the logger `lade` tells.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs

from lade.decoding.drafting.step_cost import StepCost
from lade.files import digest_of, read_record, write_record

Key = Mapping[str, object]
"""What a saved curve is good for, by readable names; anything JSON can hold."""

MAX_AGE_S = 30 * 24 * 3600.0
"""Age at which a curve is measured again: a key does not cover drivers, kernels and power settings, and passes only
refresh the sizes they have."""

logger = logging.getLogger(__name__)


def default_folder() -> Path:
    """Where curves are kept unless a caller names another folder."""
    return Path(platformdirs.user_cache_dir("lookahead-decoding", appauthor=False)) / "step-cost"


def path_of(key: Key, folder: Path | None = None) -> Path:
    """The file of a key."""
    return (default_folder() if folder is None else folder) / f"{digest_of(key)}.json"


def load(key: Key, folder: Path | None = None, *, now: Callable[[], float] = time.time) -> StepCost | None:
    """The curve saved under a key; None where there is none that can be used."""
    path = path_of(key, folder)
    try:
        cost = StepCost.from_json(read_record(path, key).get("cost"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as problem:  # ValueError: also what is no JSON and no UTF-8
        logger.warning("step cost %s cannot be used and will be measured again: %s", path, problem)
        return None
    if abs(now() - cost.measured_at) > MAX_AGE_S:
        logger.info("step cost %s is older than %.0f days and will be measured again", path, MAX_AGE_S / 86400)
        return None
    return cost


def save(key: Key, cost: StepCost, folder: Path | None = None) -> bool:
    """Save a curve: readers meanwhile find the old file or the new one, whole.

    Returns:
        Whether it was saved; if not, the reason has been logged.
    """
    path = path_of(key, folder)
    try:
        write_record(path, key, {"cost": cost.to_json()})
    except OSError as problem:
        logger.warning(
            "step cost cannot be saved in %s, and the next process measures it again: %s", path.parent, problem
        )
        return False
    return True
