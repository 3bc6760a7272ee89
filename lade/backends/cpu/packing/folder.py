"""Save packed models to folders, and load them.

    packed.json                index: contents of the files, and the model's class in transformers
    packed-00001.safetensors   tensors by name; int8 and int4 weights come with a `weight_scale`
    config.json, generation_config.json and the tokenizer's files, as written by `save_pretrained`

No file has a name that `from_pretrained` looks for, so it reports a missing model instead of loading integers as
weights.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, PreTrainedModel

from lade.backends.cpu.packing.blocks import BlockCodes
from lade.backends.cpu.packing.integers import GgufLinear, Int4Linear, Int8Linear, out_of_pairs, pairs_of
from lade.backends.cpu.packing.linear import PackedLinear, shape_of, weight_of
from lade.backends.cpu.packing.pack import pack_layers, shared_weights
from lade.errors import InputError, UnsupportedModelError
from lade.files import write_whole
from lade.model.config import dtype_name
from lade.model.facts import ModelFacts
from lade.model.randomness import DrawsFrom
from lade.model.supports import mtp_search_refusal

INDEX = "packed.json"
FORMAT = 2
SCALE = "_scale"
_SHARD_BYTES = 2**30
_OTHERS = ("*.safetensors", "pytorch_model*.bin")


@dataclass
class Index:
    """Contents of `packed.json`. Codes are uint8: of int8, 128 stands for zero; two of int4 are in a byte."""

    format: int  # version of this layout
    architecture: str  # name of the model's class in transformers
    int8: dict[str, str] = field(default_factory=dict)  # names of the layers, with the dtype of their inputs
    int4: dict[str, str] = field(default_factory=dict)
    packed: list[str] = field(default_factory=list)  # names of the layers packed in their own dtype
    files: list[str] = field(default_factory=list)  # that hold the tensors


def check_target(folder: Path) -> None:
    """Raise `InputError` for what is not a folder, holds another model, or is not writable."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{str(folder)!r} is not a folder: give the path of one")
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise InputError(f"the folder {str(folder)!r} cannot be created: {str(there)!r} is not writable")
    others = (file for kind in _OTHERS for file in folder.glob(kind))
    if any(not file.name.startswith("packed-") for file in others):
        raise InputError(f"the folder {str(folder)!r} holds another model: give an empty one")


def save_packed(model: PreTrainedModel, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
    """Write a model packed in int8 or int4 to a folder, which `load_packed` and `lade --model` can load.

    Args:
        model: a model after `lade.pack(model, weights="int8")`, or "int4".
        folder: target folder, created if it does not exist.
        tokenizer: tokenizer to save along with the model; None for none.

    Raises:
        UnsupportedModelError: no layer is in int8 or int4, or the model's class is not part of transformers.
        InputError: the path is not a folder, or the folder holds another model.
    """
    target = Path(folder)
    check_target(target)
    architecture = type(model).__name__
    if not any(isinstance(module, Int8Linear) for module in model.modules()):
        raise UnsupportedModelError(
            f"no layer of this {architecture} is in int8 or int4", "save it with save_pretrained"
        )
    if any(isinstance(module, GgufLinear) for module in model.modules()):
        raise UnsupportedModelError("the model's weights are those of a GGUF file", "keep that file")
    if getattr(transformers, architecture, None) is not type(model):
        raise UnsupportedModelError(f"{architecture} is not a class of transformers", "pack it again where you need it")
    target.mkdir(parents=True, exist_ok=True)
    (target / INDEX).unlink(missing_ok=True)  # no valid model until every file is written
    index = Index(FORMAT, architecture)
    for shard in _shards(_tensors(model, index)):
        index.files.append(f"packed-{len(index.files) + 1:05}.safetensors")
        save_file(shard, target / index.files[-1])
    for stale in set(target.glob("packed-*.safetensors")) - {target / name for name in index.files}:
        stale.unlink()
    _save_mtp_layer(model, target)
    for part in (model.config, model.generation_config, tokenizer):
        if part is not None:
            part.save_pretrained(target)
    write_whole(target / INDEX, json.dumps(asdict(index), indent=1))


def _save_mtp_layer(model: PreTrainedModel, target: Path) -> None:
    """Copy the MTP layer of the checkpoint, in its own dtype; it is packed like its model when it is used."""
    if mtp_search_refusal(ModelFacts.of(model)):
        return
    from lade.backends.mtp.load import save_layer

    if reason := save_layer(model, target):
        warnings.warn(f"saved without an MTP layer: {reason}", stacklevel=3)


def _tensors(model: PreTrainedModel, index: Index) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model by name, each once, and record their layers in `index`."""
    seen, shared = set[int](), shared_weights(model)
    for name, module in model.named_modules():
        dot, left_out = f"{name}." if name else "", ""
        if isinstance(module, PackedLinear):
            left_out = "weight"  # in a packed layout, or shared with another module
            if isinstance(module, Int8Linear):
                codes = module.codes()
                names, values = (index.int4, pairs_of(codes)) if codes.bits == 4 else (index.int8, codes.values)
                names[name] = dtype_name(module.dtype)
                yield from ((f"{dot}weight", values), (f"{dot}weight{SCALE}", codes.scale))
            else:
                index.packed.append(name)
                if id(module.weight) not in shared:
                    yield f"{dot}weight", module.dense_weight()
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and own != left_out and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{dot}{own}", tensor.detach()


def _shards(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        shard[name] = tensor.contiguous()
        if sum(each.nbytes for each in shard.values()) >= _SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def is_packed_folder(folder: str | os.PathLike[str]) -> bool:
    """Return True if `save_packed` has written this folder."""
    return (Path(folder) / INDEX).is_file()


def load_packed(folder: str | os.PathLike[str], *, attn_implementation: str | None = None) -> PreTrainedModel:
    """Load a model written by `save_packed`, packed as it was, in evaluation mode on the CPU.

    Args:
        folder: path of the folder.
        attn_implementation: name of the attention implementation, as in `from_pretrained`.

    Raises:
        InputError: the folder holds no packed model, or one of a later version, or is incomplete or damaged.
    """
    source = Path(folder)
    index = _read_index(source)
    architecture = getattr(transformers, index.architecture, None)
    if architecture is None:
        raise InputError(f"{str(source)!r} holds a {index.architecture}, which this version of transformers lacks")
    config = architecture.config_class.from_pretrained(source)
    model: PreTrainedModel = skeleton(lambda: architecture(config))
    if attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(source / name, "pt")) for name in index.files]
            _fill(model, index, {name: file for file in files for name in file.keys()})  # noqa: SIM118 - no mapping
    except (OSError, KeyError, SafetensorError) as problem:
        raise InputError(f"{str(source)!r} is incomplete or damaged ({problem}): pack the model again") from problem
    if (source / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source)
    config._name_or_path = str(source)  # where its MTP layer is
    return model


def _read_index(folder: Path) -> Index:
    try:
        index = Index(**json.loads((folder / INDEX).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as problem:
        raise InputError(
            f"{str(folder)!r} holds no packed model ({problem}): give a folder written by lade.save_packed"
        ) from problem
    if index.format != FORMAT:
        raise InputError(f"{str(folder)!r} has format {index.format}, but this version reads {FORMAT}: pack it again")
    return index


class _EmptyOnMeta(TorchFunctionMode):
    """Redirects `torch.empty` to the meta device: layers allocate no memory for weights about to be replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})


def skeleton(build: Callable[[], Any]) -> Any:
    """Return a model that was built without memory for its weights, nor draws from torch's generator."""
    with DrawsFrom(torch.Generator()), _EmptyOnMeta():
        return build().eval()


@torch.no_grad()
def _fill(model: PreTrainedModel, index: Index, files: dict[str, Any]) -> None:
    """Load tensors into a skeleton model, and pack its layers."""
    codes: dict[nn.Module, BlockCodes] = {}
    for name, dtype in (*index.int8.items(), *index.int4.items()):
        layer: Any = model.get_submodule(name)
        values, scale = (files.pop(key).get_tensor(key) for key in (f"{name}.weight", f"{name}.weight{SCALE}"))
        is_int4, (_, inputs) = name in index.int4, shape_of(layer)
        codes[layer] = out_of_pairs(values, scale, inputs) if is_int4 else BlockCodes("int8", 8, values, scale)
        empty = torch.empty(weight_of(layer).shape, dtype=getattr(torch, dtype), device="meta")
        layer._parameters["weight"] = nn.Parameter(empty)  # carries the dtype
    for name, file in files.items():
        place, _, own = name.rpartition(".")
        module, tensor = model.get_submodule(place), file.get_tensor(name)
        if own in module._parameters:
            module._parameters[own] = nn.Parameter(tensor)
        else:
            module._buffers[own] = tensor
    model.tie_weights()
    kinds: dict[nn.Module, type[PackedLinear]] = {model.get_submodule(name): PackedLinear for name in index.packed}
    kinds |= {layer: Int8Linear if each.bits == 8 else Int4Linear for layer, each in codes.items()}
    pack_layers(model, kinds, codes=codes.get)
    left = next((name for name, parameter in model.named_parameters() if parameter.device.type == "meta"), None)
    if left is not None:
        raise KeyError(left)
