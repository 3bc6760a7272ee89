"""Saved step costs: one small JSON file for each combination of machine, model, settings and versions.

    <user's cache folder>/lookahead-decoding/step-cost/<hash of the key>.json    {"key": {...}, "cost": {...}}

It is only a cache: a file that is damaged, foreign or too old is as good as none, and a folder that cannot be written
to costs a second at the next start. So none of this is an error; the logger `lade` tells.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import platformdirs
import torch
import transformers
from transformers import PreTrainedModel

from lade.decoding.drafting.step_cost import StepCost
from lade.files import digest_of, read_record, write_record
from lade.model.config import field
from lade.model.facts import ModelFacts, bytes_by_kind
from lade.model.inputs import batch_bucket
from lade.model.runner import EagerRunner
from lade.native import processor_name
from lade.version import __version__

Key = Mapping[str, object]
"""What a saved curve is good for, by readable names; anything JSON can hold."""

MAX_AGE_S = 30 * 24 * 3600.0
"""Age at which a curve is measured again: a key does not cover drivers, kernels and power settings, and passes only
refresh the sizes they have."""

_SHAPE = """
    model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes

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


def key_of(model: PreTrainedModel, runner: EagerRunner, batch: int = 1) -> dict[str, object]:
    """All that a step's cost depends on, but for the length of the text and the machine's other load.

    These two change from step to step: the curve follows them while it is used.
    """
    facts = runner.facts
    config = facts.text_config
    return {
        "devices": _names(weight.device for weight in facts.weights),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),  # which can be limited from outside
        "model": type(model).__name__,
        "shape": {name: field(config, name) for name in _SHAPE},
        "parameters": sum(weight.numel() for weight in facts.weights),
        # These two tell packed, quantised and adapted weights from plain ones: they sit in modules of other classes,
        # or are tensors of other classes, or other numbers of bytes.
        "modules": _counts(facts),
        "weights": bytes_by_kind(facts.weights),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": config._attn_implementation,
        "runner": type(runner).__name__,
        "batch": batch_bucket(batch),
        **({"processes": runner.processes} if runner.processes > 1 else {}),
        "lade": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def devices_of(model: PreTrainedModel) -> list[str]:
    """Names of the hardware that a model's weights lie on, one for each device."""
    return _names(parameter.device for parameter in model.parameters())


def _names(devices: Iterable[torch.device]) -> list[str]:
    return sorted(map(_device_name, set(devices))) or ["none"]


def _counts(facts: ModelFacts) -> dict[str, int]:
    """Modules by the name of their class."""
    counts = Counter[str]()
    for kind, modules in facts.kinds.items():
        counts[kind.__name__] += len(modules)
    return dict(counts)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {os.cpu_count()} cores" if device.type == "cpu" else device.type
