"""What processes have to have in common to decode together: versions, the model's files and what can be compared of it.

A process with other weights would spoil every text without an error, so this is compared once, before the first call.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from lade.errors import ClusterError
from lade.version import __version__

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_WEIGHT_FILES = ("*.safetensors", "*.bin")
_OWN_FIELDS = ("_name_or_path", "distributed_config")
"""Fields of a configuration that may differ: each host may have the model in a folder of its own."""


def identity_of(model: PreTrainedModel) -> dict[str, object]:
    """What this process decodes with, by readable names."""
    return {
        "lade's version": __version__,
        "torch's version": torch.__version__,
        "transformers' version": transformers.__version__,
        "the model's class": type(model).__name__,
        "the model's configuration": _of_configuration(model),
        "the model's dtype": str(model.dtype),
        "the model's files": _of_files(model),
        "the model's weights": _of_whole_weights(model),
    }


def check_alike(identities: Sequence[dict[str, object]]) -> None:
    """Raise `ClusterError`, in all processes alike, where they are not the same."""
    for rank, other in enumerate(identities):
        if wrong := [name for name, value in identities[0].items() if other[name] != value]:
            raise ClusterError(
                f"{', '.join(wrong)} of process {rank} and of process 0 differ, and decoding together needs the same: "
                "start all of them with the same versions and the same model"
            )


def _of_configuration(model: PreTrainedModel) -> int:
    fields: dict[str, Any] = model.config.to_dict()
    return zlib.crc32(repr(sorted((k, repr(v)) for k, v in fields.items() if k not in _OWN_FIELDS)).encode())


def _of_files(model: PreTrainedModel) -> object:
    """The commit on the hub; of a folder, sizes of the weight files and bytes here and there in them."""
    folder = Path(str(getattr(model.config, "_name_or_path", "")))
    if not folder.is_dir():
        return getattr(model.config, "_commit_hash", None)
    files = sorted(file for pattern in _WEIGHT_FILES for file in folder.glob(pattern))
    return [(file.name, file.stat().st_size, _sampled(file)) for file in files]


def _sampled(file: Path) -> int:
    size, digest = file.stat().st_size, 0
    with file.open("rb") as opened:
        for number in range(_SAMPLES):
            opened.seek(size * number // _SAMPLES)
            digest = zlib.crc32(opened.read(_SAMPLE_BYTES), digest)
    return digest


def _of_whole_weights(model: PreTrainedModel) -> int:
    """Of weights that every process has whole, such as those of norms: the first ones of each."""
    from torch.distributed.tensor import DTensor  # takes half a second, and not every build of torch has it

    digest = 0
    for weight in model.parameters():
        if not isinstance(weight, DTensor) and weight.device.type != "meta":
            few = weight.detach().flatten()[:_SAMPLE_BYTES].view(torch.uint8).cpu()
            digest = zlib.crc32(few.numpy().tobytes(), digest)
    return digest
