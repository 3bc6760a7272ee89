"""Verdicts of the trials of invariant models, kept in the user's cache folder.

Trials of a model's layers take seconds, and depend on its structure, the processor, the compiled kernels and the
versions of torch and transformers, but not on its weights. So what they found for a structure is kept, and the next
start with the same one makes a single short trial of the whole model.

    <user's cache folder>/lookahead-decoding/invariant/<hash of the key>.json    {"key": {...}, "paddings": [...]}

A model of classes that are neither torch's nor transformers', or with hooks, is tried anew at each start: its structure
does not tell what it computes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from lade.backends.cpu.invariant.padded_rows import RowPadding
from lade.files import Records
from lade.native import library_path, processor_name
from lade.version import __version__

RECORDS = Records("invariant", "the verdict of invariance trials")
_KNOWN_PACKAGES = ("torch", "transformers", "lade")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
Paddings = list[RowPadding | None]
"""What trials of products found, in the order of the model's distinct products; None where no padding is enough."""


def key_of(model: PreTrainedModel) -> dict[str, object] | None:
    """Return what the trials of a model depend on, by readable names; None if its structure does not tell.

    Args:
        model: a model that is not invariant yet.
    """
    structure = hashlib.sha256()
    for name, module in model.named_modules():
        if not _is_known(module):
            return None
        structure.update(repr((name, *kind_of(module))).encode())
    return {
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "products": [torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()],
        "kernels": _digest_of(library_path()),
        "model": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "structure": structure.hexdigest(),
        "config": hashlib.sha256(json.dumps(_settings(model), sort_keys=True, default=str).encode()).hexdigest(),
        "lade": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def kind_of(module: nn.Module) -> tuple[object, ...]:
    """Return what tells a module's computation from that of others, without its children and its weights' values."""
    kind = type(module)
    weights = [
        (name, type(weight.data).__name__, tuple(weight.shape), weight.stride(), str(weight.dtype))
        for name, weight in (*module._parameters.items(), *module._buffers.items())
        if weight is not None and weight.layout is torch.strided
    ]
    return f"{kind.__module__}.{kind.__qualname__}", *sorted(_scalars(vars(module))), *weights


def kept_paddings(key: Mapping[str, object]) -> Paddings | None:
    """Return what trials found under a key; None if none were kept."""
    record = RECORDS.load(key)
    if record is None:
        return None
    try:
        return [None if each is None else RowPadding(*each) for each in record["paddings"]]
    except (KeyError, TypeError):
        return None


def keep_paddings(key: Mapping[str, object], paddings: Sequence[RowPadding | None]) -> None:
    """Keep what trials found under a key."""
    RECORDS.save(key, {"paddings": [None if each is None else astuple(each) for each in paddings]})


def _is_known(module: Any) -> bool:
    known = type(module).__module__.partition(".")[0] in _KNOWN_PACKAGES and "forward" not in vars(module)
    return known and not any(vars(module).get(name) for name in _HOOKS)


def _scalars(state: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield attributes that may be settings; the index of a layer is none."""
    for name, value in state.items():
        if isinstance(value, bool | int | float | str | torch.dtype) and name not in ("training", "layer_idx"):
            yield name, repr(value)


def _settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the configuration without what names the checkpoint."""
    settings: dict[str, Any] = model.config.to_dict()
    return {name: value for name, value in settings.items() if name not in ("_name_or_path", "transformers_version")}


@cache
def _digest_of(path: Path) -> str:
    """Return a digest of the compiled library, since the order of its sums is the compiler's as well."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
