"""Looks for MTP layers in the files of a model's checkpoint; reads their names and shapes, and no weights.

transformers drops such layers when it loads a model, by `_keys_to_ignore_on_load_unexpected`. They stand in the files
under one of two kinds of names:

    mtp.layers.0.*, mtp.fc, mtp.norm ...      Qwen3-Next, Qwen3.5, Mellum; model.mtp.* in MiMo V2
    model.layers.N.*, N = num_hidden_layers   DeepSeek V3, GLM-4 MoE, Bailing, Step 3.7

Models whose class does not ignore such names report them as unexpected when they are loaded. Their checkpoints keep the
layer apart, in the folder `mtp`, as a `model.safetensors` of its own with names of the first kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
SUBFOLDER = "mtp"
"""Folder of a checkpoint with the weights of its MTP layers, where they are not among the model's."""
_PREFIXED = re.compile(r"(?:^|\.)mtp\.")
_NUMBERED = re.compile(r"^(?:model\.(?:language_model\.)?)?layers\.(\d+)\.")
_FIRST_PREFIXED = r"(?:^|\.)mtp\.(?!layers\.[1-9])"
_ALL = -1
_DTYPES = ("BF16", "F16", "F32", "F64")
"""Dtypes of plain weights; others are quantised, and transformers reads a layer without their scales."""
_SHARED = re.compile(r"(?:embed_tokens|shared_head\.head|lm_head)\.weight$")
"""Copies of the model's own embedding and head, which some checkpoints duplicate."""


@dataclass(frozen=True)
class Found:
    """The first MTP layer of a checkpoint, which is the one that is used.

    Attributes:
        folder: folder of its files.
        layers: how many layers the checkpoint has.
        pattern: matches the names of the first one's weights, and of those of all.
        shapes: their shapes, by name.
    """

    folder: Path
    layers: int
    pattern: str
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def experts(self) -> bool:
        """True for a mixture of experts."""
        return any(".experts." in name for name in self.shapes)

    @property
    def parameters(self) -> int:
        """Numbers in its weights, without copies of the model's own embedding and head."""
        return sum(prod(shape) for name, shape in self.shapes.items() if not _SHARED.search(name))


class NoLayersError(Exception):
    """There are none, or none that can be read; the message is the reason, as a phrase that continues "it ..."."""


def find(model: PreTrainedModel) -> Found:
    """Look for a model's MTP layers.

    Raises:
        NoLayersError: there are none.
    """
    config: PretrainedConfig = model.config.get_text_config(decoder=True)
    folder = folder_of(model)
    if (folder / SUBFOLDER / _SINGLE).is_file():
        folder = folder / SUBFOLDER
    shapes, numbers = dict[str, tuple[int, ...]](), set[int]()
    for name, part in _weights(folder):
        number = layer_number(name, config.num_hidden_layers)
        if number is not None:
            numbers.add(number)
        if number in (0, _ALL):
            shapes[name] = tuple(part.get_shape())
            if part.get_dtype() not in _DTYPES:
                raise NoLayersError(f"has an MTP layer that is quantised ({name} is {part.get_dtype()})")
    if not shapes:
        raise NoLayersError(f"has no weights of MTP layers in its files ({folder})")
    prefixed = any(_PREFIXED.search(name) for name in shapes)
    pattern = _FIRST_PREFIXED if prefixed else rf"(?:^|\.)layers\.{config.num_hidden_layers}\."
    return Found(folder, max(1, len(numbers - {_ALL})), pattern, shapes)


def layer_number(name: str, hidden_layers: int) -> int | None:
    """The number of the MTP layer that a weight of a checkpoint belongs to; `_ALL` for all of them, None for none."""
    if _PREFIXED.search(name):
        inner = re.search(r"mtp\.layers\.(\d+)\.", name)
        return int(inner[1]) if inner else _ALL
    numbered = _NUMBERED.match(name)
    if numbered and int(numbered[1]) >= hidden_layers:
        return int(numbered[1]) - hidden_layers
    return None


def folder_of(model: PreTrainedModel) -> Path:
    """The folder with the files that a model was loaded from.

    Raises:
        NoLayersError: it was made from no file, or its files are not on this machine any more.
    """
    name: str = getattr(model.config, "_name_or_path", "") or ""
    if not name:
        raise NoLayersError("was loaded from no checkpoint")
    if Path(name).is_dir():
        return Path(name)
    revision = getattr(model.config, "_commit_hash", None)
    for file in (_INDEX, _SINGLE):
        cached = try_to_load_from_cache(name, file, revision=revision)
        if isinstance(cached, str):
            return Path(cached).parent
    raise NoLayersError(f"was loaded from {name!r}, which is neither a folder of safetensors files here nor cached")


def copy_layer(found: Found, folder: Path) -> None:
    """Write a layer to where `find` looks for it in another folder."""
    weights = {name: part[:] for name, part in _weights(found.folder) if name in found.shapes}
    (folder / SUBFOLDER).mkdir(exist_ok=True)
    save_file(weights, folder / SUBFOLDER / _SINGLE, metadata={"format": "pt"})


def _weights(folder: Path) -> Iterator[tuple[str, Any]]:
    """Names and slices of all weights that may be an MTP layer's."""
    for file in _files(folder):
        with safe_open(folder / file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 - it is no dictionary
                yield name, weights.get_slice(name)


def _files(folder: Path) -> list[str]:
    """The files that may hold some, by the index if there is one."""
    if (folder / _INDEX).is_file():
        index: dict[str, str] = json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"]
        return sorted({file for name, file in index.items() if _PREFIXED.search(name) or _NUMBERED.match(name)})
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    raise NoLayersError(f"has no safetensors files in {folder}")
