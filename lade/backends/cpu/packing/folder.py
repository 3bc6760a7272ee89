"""Save packed models to folders, and load them.

    packed.json                what the files hold, and which class of transformers it is of
    packed-00001.safetensors   tensors by their names; int8 weights beside a `weight_scale`
    config.json, generation_config.json and the tokenizer's files, as `save_pretrained` writes them

No file has a name that `from_pretrained` looks for, which therefore says so instead of loading integers as weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
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
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from lade.backends.cpu.packing.int8 import Int8Linear, input_form
from lade.backends.cpu.packing.integer_products import Codes
from lade.backends.cpu.packing.linear import PackedLinear, weight_of
from lade.backends.cpu.packing.pack import guard, pack_layers, shared_weights
from lade.errors import InputError, UnsupportedModelError
from lade.files import write_whole
from lade.model.config import dtype_name
from lade.model.randomness import DrawsFrom

INDEX = "packed.json"
FORMAT = 1
SCALE = "_scale"
_SHARD_BYTES = 2**30
_OTHERS = ("*.safetensors", "pytorch_model*.bin")


@dataclass
class Index:
    """What `packed.json` says.

    Attributes:
        format: version of this layout.
        architecture: name of a class of transformers.
        int8: names of the layers in int8, and the dtype of what each is fed.
        packed: names of the layers that are packed in their dtype.
        files: those with the tensors.
    """

    format: int
    architecture: str
    int8: dict[str, str] = field(default_factory=dict)
    packed: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


def check_target(folder: Path) -> None:
    """Whether a packed model may be written there.

    Raises:
        InputError: it is no folder, holds another model, or cannot be made or written to.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{str(folder)!r} is no folder: give the name of one")
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise InputError(f"the folder {str(folder)!r} cannot be made: {str(there)!r} cannot be written to")
    others = (file for kind in _OTHERS for file in folder.glob(kind))
    if any(not file.name.startswith("packed-") for file in others):
        raise InputError(f"the folder {str(folder)!r} holds another model: give an empty one")


def save_packed(model: PreTrainedModel, folder: str | os.PathLike[str], tokenizer: Any = None) -> None:
    """Write a model that is packed in int8 into a folder, from which `load_packed` and `lade --model` load it.

    Args:
        model: after `lade.pack(model, weights="int8")`.
        folder: is made if it is not there.
        tokenizer: is written, too.

    Raises:
        UnsupportedModelError: no layer is in int8, or its class is not one of transformers.
        InputError: the folder is none, or holds another model.
    """
    target = Path(folder)
    check_target(target)
    architecture = type(model).__name__
    if not any(isinstance(module, Int8Linear) for module in model.modules()):
        raise UnsupportedModelError(f"no layer of this {architecture} is in int8", "write it with save_pretrained")
    if getattr(transformers, architecture, None) is not type(model):
        raise UnsupportedModelError(f"{architecture} is no class of transformers", "pack it anew where you need it")
    target.mkdir(parents=True, exist_ok=True)
    (target / INDEX).unlink(missing_ok=True)  # until all is there again, this is no model
    index = Index(FORMAT, architecture)
    for shard in _shards(_tensors(model, index)):
        index.files.append(f"packed-{len(index.files) + 1:05}.safetensors")
        save_file(shard, target / index.files[-1])
    for stale in set(target.glob("packed-*.safetensors")) - {target / name for name in index.files}:
        stale.unlink()
    for part in (model.config, model.generation_config, tokenizer):
        if part is not None:
            part.save_pretrained(target)
    write_whole(target / INDEX, json.dumps(asdict(index), indent=1))


def _tensors(model: PreTrainedModel, index: Index) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a model by their names, each once; what they are is noted in `index`."""
    seen, shared = set[int](), shared_weights(model)
    for name, module in model.named_modules():
        dot, left_out = f"{name}." if name else "", ""
        if isinstance(module, PackedLinear):
            left_out = "weight"  # of a packed layer it is in another layout, or another module's too
            if isinstance(module, Int8Linear):
                codes = module.codes()
                index.int8[name] = dtype_name(module.dtype)
                yield from ((f"{dot}weight", codes.values), (f"{dot}weight{SCALE}", codes.scale))
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
    """Whether `save_packed` has written it."""
    return (Path(folder) / INDEX).is_file()


def load_packed(folder: str | os.PathLike[str], *, attn_implementation: str | None = None) -> PreTrainedModel:
    """The model that `save_packed` wrote, packed as it was, in evaluation mode on the CPU.

    Args:
        folder: where it lies.
        attn_implementation: as of `from_pretrained`.

    Raises:
        InputError: it is no such folder, of a later version, incomplete or damaged.
        UnsupportedModelError: this PyTorch has no exact int8 kernel here.
    """
    source = Path(folder)
    index = _read_index(source)
    architecture = getattr(transformers, index.architecture, None)
    if architecture is None:
        raise InputError(f"{str(source)!r} holds a {index.architecture}, which this transformers does not have")
    config = architecture.config_class.from_pretrained(source)
    model = _skeleton(architecture, config)
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
    return model


def _read_index(folder: Path) -> Index:
    try:
        values = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        index = Index(**values)
    except (OSError, ValueError, TypeError) as problem:
        raise InputError(
            f"{str(folder)!r} holds no packed model ({problem}): give one of lade.save_packed"
        ) from problem
    if index.format != FORMAT:
        raise InputError(f"{str(folder)!r} is of format {index.format}, and this version reads {FORMAT}: pack it again")
    return index


class _EmptyOnMeta(TorchFunctionMode):
    """Matrices that layers make for their weights have a shape and no memory: they are about to be replaced."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{**(kwargs or {}), **({"device": "meta"} if func is torch.empty else {})})


def _skeleton(architecture: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    with DrawsFrom(torch.Generator()), _EmptyOnMeta():
        model = architecture(config)
    model.eval()
    return model


@torch.no_grad()
def _fill(model: PreTrainedModel, index: Index, files: dict[str, Any]) -> None:
    """Give a skeleton its tensors, and pack its layers."""
    codes: dict[nn.Module, Codes] = {}
    for name, dtype in index.int8.items():
        layer = model.get_submodule(name)
        values, scale = (files.pop(key).get_tensor(key) for key in (f"{name}.weight", f"{name}.weight{SCALE}"))
        codes[layer] = Codes(values, scale)
        empty = torch.empty(weight_of(layer).shape, dtype=getattr(torch, dtype), device="meta")
        layer._parameters["weight"] = nn.Parameter(empty)  # for its dtype
    for outputs, inputs in {each.values.shape for each in codes.values()}:
        input_form(inputs, outputs)  # raises before anything is filled in
    for name, file in files.items():
        place, _, own = name.rpartition(".")
        module, tensor = model.get_submodule(place), file.get_tensor(name)
        if own in module._parameters:
            module._parameters[own] = nn.Parameter(tensor)
        else:
            module._buffers[own] = tensor
    model.tie_weights()
    kinds: dict[nn.Module, type[PackedLinear]] = {model.get_submodule(name): PackedLinear for name in index.packed}
    pack_layers(model, {**kinds, **dict.fromkeys(codes, Int8Linear)}, codes=codes)
    guard(model)
    left = next((name for name, parameter in model.named_parameters() if parameter.device.type == "meta"), None)
    if left is not None:
        raise KeyError(left)
