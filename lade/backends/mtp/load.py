"""MTP layers of a model: looked for in the files of its checkpoint, and loaded by transformers' `MtpModel`.

transformers drops such layers when it loads a model, by `_keys_to_ignore_on_load_unexpected`. They stand in the files
under one of two kinds of names:

    mtp.layers.0.*, mtp.fc, mtp.norm ...      Qwen3-Next, Qwen3.5, Mellum; model.mtp.* in MiMo V2
    model.layers.N.*, N = num_hidden_layers   DeepSeek V3, GLM-4 MoE, Bailing, Step 3.7

Models whose class does not ignore such names report them as unexpected when they are loaded. Their checkpoints keep the
layer apart, in the folder `mtp`, as a `model.safetensors` of its own with names of the first kind.

Names and shapes are read before any weight. A layer is loaded once for each model, where there is memory for it.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
from huggingface_hub import try_to_load_from_cache
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel, modeling_layers

from lade.decoding.mtp import MtpHabits
from lade.locks import ForkSafeLock
from lade.model.config import field as config_field
from lade.model.facts import PACKED, ModelFacts
from lade.model.supports import MtpSupport
from lade.version import minor_version

logger = logging.getLogger(__name__)

_OLDEST = (5, 23)
"""The first transformers that reads layers of all layouts; `MtpModel` itself is older."""
_MEMORY_SHARE = 0.5  # of the memory that is free: texts need some, too
_COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")
_FULL_ATTENTION = "full_attention"
_RECURRENT = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp")
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
    """The first MTP layer of a checkpoint, which is the one that is used."""

    folder: Path  # of its files
    layers: int  # number of layers in the checkpoint
    pattern: str  # matches the names of the first one's weights, and of those of all
    shapes: Mapping[str, tuple[int, ...]]  # of the weights, by name

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
    """Look for a model's MTP layers; raises `NoLayersError` if there are none."""
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


@dataclass
class Loaded:
    """A model's MTP layer."""

    mtp: Any  # transformers' module, with one layer; it shares embedding, head and rotary frequencies with the model
    found: Found  # what it was loaded from
    habits: dict[str, MtpHabits] = field(default_factory=dict)  # what texts have taught about it, by their kind
    packed: bool = False  # true once it is packed like its model

    @property
    def nbytes(self) -> int:
        """Bytes of the layer, without what it shares with the model."""
        return sum(weight.nbytes for weight in self.mtp.layers.parameters())


_known: WeakKeyDictionary[PreTrainedModel, tuple[tuple[Any, ...], Loaded | str]] = WeakKeyDictionary()
_loading = ForkSafeLock()


def layer_of(model: PreTrainedModel) -> Loaded | str:
    """Return the MTP layer of a model, loaded now if it never was, or the reason why there is none to be used.

    Either is remembered as long as the model is of the same checkpoint, dtype and device.
    """
    state = model.config._name_or_path, model.dtype, model.device
    with _loading:
        known = _known.get(model)
        if known is None or known[0] != state:
            known = state, _loaded(model)
            _known[model] = known
    if isinstance(known[1], Loaded):
        mtp = known[1].mtp
        if mtp.shared_head is not model.get_output_embeddings():  # packed or replaced since: it shares those of now
            mtp.tie_with_main_model(model)
    return known[1]


def pack_alike(loaded: Loaded, facts: ModelFacts) -> None:
    """Pack the layer if its model is packed, in the integers of the model's layers if any: passes take half as long."""
    packing = PACKED.loaded()
    with _loading:  # rows of other threads share the layer
        if loaded.packed or packing is None:
            return
        packed = [kind for kind in facts.kinds if issubclass(kind, packing.packed_layer)]
        if packed:
            kind = next((kind for kind in packed if issubclass(kind, packing.int8_layer)), packed[0])
            packing.pack_like(loaded.mtp.layers, facts.kinds[kind][0])
            loaded.packed = True


def _loaded(model: PreTrainedModel) -> Loaded | str:
    try:
        found = find(model)
        check_room(model, found)
        return Loaded(load(model, found), found)
    except Exception as problem:  # noqa: BLE001 - files are what others have left: they cost drafts, never the text
        return _reason(model, problem)


def save_layer(model: PreTrainedModel, folder: Path) -> str:
    """Write a model's layer to where it is found in another folder; return why there is none, or an empty string."""
    try:
        found = find(model)
        weights = {name: part[:] for name, part in _weights(found.folder) if name in found.shapes}
        (folder / SUBFOLDER).mkdir(exist_ok=True)
        save_file(weights, folder / SUBFOLDER / _SINGLE, metadata={"format": "pt"})
    except Exception as problem:  # noqa: BLE001 - as when it is loaded
        return _reason(model, problem)
    return ""


def give_up(model: PreTrainedModel, problem: Exception) -> None:
    """Do without the layer from now on, as one of its passes has failed; `layer_of` tells why."""
    with _loading:
        state, _ = _known[model]
        _known[model] = state, f"a pass of {type(model).__name__}'s MTP layer has failed ({_first_line(problem)})"
    logger.warning("%s: texts go on without it", _known[model][1], exc_info=problem)


def _reason(model: PreTrainedModel, problem: Exception) -> str:
    if not isinstance(problem, NoLayersError):
        logger.warning("the MTP layer of %s cannot be read: %s", type(model).__name__, problem)
        problem = NoLayersError(f"has an MTP layer that cannot be read ({_first_line(problem)})")
    return f"{type(model).__name__} {problem}"


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0]


def examine(model: PreTrainedModel) -> MtpSupport:
    """Return what is known of a model's MTP layers without loading any."""
    known = _known.get(model)
    result = None if known is None else known[1]
    if isinstance(result, str):
        return MtpSupport(reason=result)
    if result is not None:
        return MtpSupport(layers=result.found.layers, nbytes=result.nbytes, loaded=True)
    try:
        found = find(model)
        nbytes = found.parameters * model.dtype.itemsize
        check_room(model, found)
        _stand_in(model, found)
    except Exception as problem:  # noqa: BLE001 - as when it is loaded
        return MtpSupport(reason=_reason(model, problem))
    return MtpSupport(layers=found.layers, nbytes=nbytes)


def check_room(model: PreTrainedModel, found: Found) -> None:
    """Raise `NoLayersError` where the layer would take more than half of the memory that is free."""
    needed, device = found.parameters * model.dtype.itemsize, model.device
    free = free_bytes(device)
    if needed > _MEMORY_SHARE * free:
        raise NoLayersError(
            f"has MTP layers of which the first takes {needed / 2**30:.2f} GiB, and {free / 2**30:.2f} GiB are free on "
            f"{device}: it would leave less than half of that for texts"
        )


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device; on the host what can be used without swapping, where that is known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:  # counts what is cached of files, too
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # another system than Linux
        return 2**33


def load(model: PreTrainedModel, found: Found) -> Any:
    """Have transformers read the layer; the model itself is not changed.

    Raises:
        NoLayersError: transformers cannot read it, or its kind cannot process token trees.
    """
    mtp: Any = _reader().from_pretrained(_stand_in(model, found), device_map={"": model.device})
    if not all(weight.isfinite().all() for weight in mtp.layers.parameters()):
        raise NoLayersError("has an MTP layer with weights that are not finite")
    own = [mtp.layers, *([mtp.shared_post_norm] if mtp.use_shared_post_norm else [])]
    for module in own:  # all else is the model's
        module.to(device=model.device, dtype=model.dtype).eval().requires_grad_(False)
    if (implementation := mtp.config._attn_implementation) not in ("eager", "sdpa"):
        mtp.config._attn_implementation = "sdpa"  # ours want masks of their own, and what drafts need not be exact
        logger.debug("the MTP layer attends by sdpa, not by %s", implementation)
    return mtp


@cache
def _reader() -> Any:
    """Return transformers' `MtpModel`, made without a change of the process: other threads make tensors meanwhile.

    Raises:
        NoLayersError: this version of transformers has none.
    """
    base: Any = getattr(modeling_layers, "MtpModel", None)
    if base is None or minor_version(transformers.__version__) < _OLDEST:
        version = transformers.__version__
        raise NoLayersError(f"has MTP layers, and transformers {version} cannot read them: install 5.23 or newer")

    class MtpModel(base):  # type: ignore[misc]  # no class for type checkers
        __module__ = base.__module__  # with the class's name: by both transformers knows the names of its weights

        def __init__(self, model: Any, layers: int) -> None:
            super().__init__(model, layers)
            self.layers.to(model.dtype)

        @classmethod
        def get_init_context(cls, *_: Any) -> list[AbstractContextManager[Any]]:
            """Weights without values until they are read; this device is a thread's own, a default dtype is not."""
            return [torch.device("meta")]

        def tie_weights(self, *_: Any, **__: Any) -> None:
            """Embedding and head are the model's own."""

    return MtpModel


def _stand_in(model: PreTrainedModel, found: Found) -> Any:
    """Return the same model with a configuration of its own, as `MtpModel.from_pretrained` expects it.

    Raises:
        NoLayersError: the layer is of a kind that cannot process token trees.
    """
    stand_in: Any = copy.copy(model)
    stand_in.config = config = copy.deepcopy(model.config)
    config.name_or_path = str(found.folder)
    stand_in._keys_to_ignore_on_load_unexpected = [found.pattern]
    text: Any = config.get_text_config(decoder=True)
    if len(blocks := config_field(text, "mtp_layers_block_type") or ()) > 1:
        raise NoLayersError(f"has MTP layers of several blocks ({', '.join(blocks)}), which transformers cannot read")
    for name in _COUNTS:
        if isinstance(config_field(text, name), int):
            setattr(text, name, 1)
    text.num_mtp_layers = 1
    if config_field(text, "layer_types"):
        like_the_last = _FULL_ATTENTION if _FULL_ATTENTION in text.layer_types else text.layer_types[-1]
        types = config_field(text, "mtp_layer_types") or [like_the_last]
        _set_types(text, "mtp_layer_types", types)
        if set(types[:1]) & set(_RECURRENT):
            raise NoLayersError(f"has an MTP layer that carries a state ({types[0]})")
    if config_field(text, "mlp_layer_types"):
        types = config_field(text, "mtp_mlp_layer_types") or ["sparse" if found.experts else "dense"]
        _set_types(text, "mtp_mlp_layer_types", types)
    return stand_in


def _set_types(config: Any, name: str, types: Sequence[str]) -> None:
    """Set the types of the first MTP layer, unless the configuration derives them from the number of layers."""
    if not isinstance(getattr(type(config), name, None), property):
        setattr(config, name, list(types)[:1])
