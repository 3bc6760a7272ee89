"""`lade.load_gguf`: a model from a GGUF file, its weights packed for the CPU as they are in the file.

Matrices become packed layers with the file's own codes, scales and minima, without a second rounding. Norms, biases and
embeddings are dequantised, and so are matrices of types that no kernel takes. Configuration and tokenizer are what
transformers makes of the file, and the `gguf` package names the tensors.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.utils import logging as _logging

from lade.announcements import announce, announced_if_slow
from lade.backends.cpu.packing.blocks import BlockCodes
from lade.backends.cpu.packing.folder import skeleton
from lade.backends.cpu.packing.gguf_file import (
    Elements,
    Header,
    TensorPlace,
    codes_of,
    gguf_file,
    has_codes,
    read_header,
    values_of,
)
from lade.backends.cpu.packing.integers import GgufLinear
from lade.backends.cpu.packing.pack import pack_layers
from lade.errors import InputError
from lade.version import minor_version

logger = logging.getLogger(__name__)

PACKED = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
"""Architectures whose matrices stay as they are; Mistral's files say llama. Others are dequantised."""
FREQUENCIES = "rope_freqs.weight"
_OLDEST = (5, 23)  # the first transformers that makes the tokenizers of all these files
_PAIRED = ("attn_q.weight", "attn_k.weight")  # rows are in another order in files of "llama"


def load_gguf(path: str | os.PathLike[str], *, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """Load a model and its tokenizer from a GGUF file, in evaluation mode on the CPU.

    Matrices in Q4_0 to Q8_0, Q3_K to Q6_K and IQ4 stay as they are, in packed layers whose inputs are rounded to int8
    with a scale for every 32. After `lade.invariant(model)` drafts are exact against its plain decoding.

    Args:
        path: file, or folder that holds one.
        dtype: dtype of all else: of norms, biases, embeddings, activations, and of matrices in other types.

    Returns:
        The transformers model and its tokenizer, with the file's chat template.

    Raises:
        InputError: the `gguf` package is not installed, or transformers is older than 5.23; or the file does not exist,
            is damaged, or holds no model that transformers can build.
    """
    file = gguf_file(Path(path))
    if file is None:
        raise InputError(f"{str(path)!r} is neither a GGUF file nor a folder with one: check the path")
    try:
        importlib.import_module("gguf")
    except ImportError as problem:
        raise InputError(f"GGUF files need gguf ({problem}): run  pip install gguf") from problem
    if minor_version(transformers.__version__) < _OLDEST:
        raise InputError(f"GGUF files need transformers 5.23, and {transformers.__version__} is installed: upgrade it")
    header = read_header(file)
    with _one_line(file), _quiet(), announced_if_slow(logger, f"loading {file.name}"):
        tokenizer = _tokenizer(header)
        model = _packed(header, dtype) if header.architecture in PACKED else _dequantised(header, dtype)
        model.generation_config = _generation(header)
    return model.eval(), tokenizer


@contextmanager
def _one_line(file: Path) -> Iterator[None]:
    """Raise `InputError` for whatever transformers, tokenizers or gguf cannot make of a file."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as problem:
        reason = " ".join(str(problem).split())[:240] or type(problem).__name__
        raise InputError(f"model file {str(file)!r} cannot be loaded: {type(problem).__name__}: {reason}") from problem


@contextmanager
def _quiet() -> Iterator[None]:
    """Switch transformers' progress bars off, and restore them."""
    bars: Any = _logging
    enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            bars.enable_progress_bar()


def _tokenizer(header: Header) -> Any:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(header.path.parent, gguf_file=header.path.name)
    template = header.values.get("tokenizer.chat_template")
    if tokenizer.chat_template is None and isinstance(template, str):
        tokenizer.chat_template = template
    return tokenizer


def _generation(header: Header) -> GenerationConfig:
    """Return greedy settings with the file's special ids; a turn's end stops like that of a text."""
    ids = {name: header.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    stops = [each for each in (ids["eos"], ids["eot"]) if isinstance(each, int)]
    padding = ids["padding"] if isinstance(ids["padding"], int) else next(iter(stops), None)
    return GenerationConfig(bos_token_id=ids["bos"], eos_token_id=sorted(set(stops)) or None, pad_token_id=padding)


def _dequantised(header: Header, dtype: torch.dtype) -> Any:
    """Return a model as transformers loads it, all weights dequantised."""
    packs = hasattr(transformers, "GgufConfig")  # earlier versions always dequantise
    options = {"quantization_config": transformers.GgufConfig(dequantize=True)} if packs else {}
    announce(logger, f"{header.path.name}: weights of {header.architecture} are dequantised to {dtype}")
    folder, name = header.path.parent, header.path.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=dtype, **options)


# Models with packed layers


@dataclass(frozen=True)
class _Source:
    """The tensors of a file by the names of a model's parameters."""

    header: Header
    config: Any
    names: Callable[[str], str | None]
    data: np.ndarray[Any, np.dtype[np.uint8]]

    def place(self, name: str, parameter: torch.Tensor) -> TensorPlace:
        """Return the tensor of a parameter; raises `InputError` if there is none of its shape."""
        layer, _, own = name.rpartition(".")
        place = self.header.tensors.get(f"{self.names(layer)}.{own}")
        if place is None or place.shape != tuple(parameter.shape):
            given = "lacks it" if place is None else f"has {list(place.shape)}"
            _refuse(self.header, f"weight {name} is {list(parameter.shape)}, but the file {given}")
        return place

    def _raw(self, place: TensorPlace) -> torch.Tensor:
        """Return a tensor's bytes in the model's order of rows, `[..., bytes]` uint8."""
        numbers = torch.from_numpy(self.data[place.offset : place.offset + place.nbytes].copy())
        rows = numbers.view(*place.shape[:-1], place.nbytes // prod(place.shape[:-1]))
        if self.header.architecture == "llama" and place.name.endswith(_PAIRED):
            config, of_keys = self.config, "attn_k" in place.name
            heads = config.num_key_value_heads if of_keys else config.num_attention_heads
            rows = rows.unflatten(0, (heads, -1, 2)).swapaxes(1, 2).flatten(0, 2)  # pairs side by side to halves
        return rows

    def codes(self, place: TensorPlace) -> BlockCodes:
        """Return the codes of a matrix, of a type that has them."""
        return codes_of(self._raw(place), place.kind)

    def values(self, place: TensorPlace) -> torch.Tensor:
        """Return a tensor's values as the model has them, float32."""
        found = values_of(self._raw(place), place)
        is_norm = self.header.architecture == "gemma3" and "norm" in place.name
        return found - 1 if is_norm else found  # Gemma's norms add one


def config_of(header: Header) -> Any:
    """Return the configuration that transformers' own table of names gives, without reading the vocabulary."""
    architecture, values = header.architecture, header.values
    fields: dict[str, Any] = {}
    names: dict[str, str | None] = dict(GGUF_CONFIG_MAPPING[architecture])  # type: ignore[call-overload]
    for key, name in names.items():
        value = values.get(f"{architecture}.{key}")
        if isinstance(value, Elements):
            _refuse(header, f"{architecture}.{key} differs between layers, which is not supported")
        if name is not None and value is not None:
            fields[name] = value
    if (size := values.get(f"{architecture}.attention.key_length")) is not None:
        fields["head_dim"] = size  # which that table lacks for Qwen 3
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        fields[f"{name}_token_id"] = values.get(f"tokenizer.ggml.{key}_token_id")
    fields["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in header.tensors
    return AutoConfig.for_model("gemma3_text" if architecture == "gemma3" else architecture, **fields)


def _packed(header: Header, dtype: torch.dtype) -> Any:
    """Return a model with the file's matrices in packed layers."""
    import gguf

    config = config_of(header)
    model: Any = skeleton(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    _fill(model, _Source(header, config, names.get_name, np.memmap(header.path, np.uint8, "r")), dtype)
    return model


@torch.no_grad()
def _fill(model: Any, source: _Source, dtype: torch.dtype) -> None:
    """Give a model on the meta device its weights, and pack its linear layers."""
    head, tied = model.get_output_embeddings(), bool(model.config.tie_word_embeddings)
    coded, used, dequantised = dict[nn.Module, TensorPlace](), set[str](), Counter[str]()
    for name, module in model.named_modules():
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            is_tied = module is head and tied
            place = source.place("model.embed_tokens.weight" if is_tied else f"{name}.{own}", parameter)
            used.add(place.name)
            is_matrix = type(module) is nn.Linear and own == "weight"
            if is_matrix and has_codes(place.kind):
                coded[module] = place
            elif not is_tied:
                values = source.values(place).to(dtype)
                module._parameters[own] = nn.Parameter(values, requires_grad=False)
                dequantised.update([place.kind] if is_matrix else [])
    model.tie_weights()
    pack_layers(model, dict.fromkeys(coded, GgufLinear), codes=lambda layer: source.codes(coded[layer]))
    used |= _scale_frequencies(model, source)
    _tell(source.header, dequantised, used, dtype)


def _scale_frequencies(model: Any, source: _Source) -> set[str]:
    """Divide rotary frequencies by the file's factors, which Llama 3 has; return the names of tensors used."""
    place, rotary = source.header.tensors.get(FREQUENCIES), getattr(model.model, "rotary_emb", None)
    if place is None or getattr(getattr(rotary, "inv_freq", None), "shape", None) != place.shape:
        return set()
    for name in ("inv_freq", "original_inv_freq"):
        setattr(rotary, name, getattr(rotary, name) / source.values(place))
    return {FREQUENCIES}


def _tell(header: Header, dequantised: Counter[str], used: set[str], dtype: torch.dtype) -> None:
    """Say in one line what did not stay as it is, and in another what the model does not use.

    If that is a tensor of a layer, the model would compute something else: it is refused.
    """
    unused = sorted(set(header.tensors) - used)
    if (of_layer := next((name for name in unused if name.startswith("blk.")), None)) is not None:
        _refuse(header, f"its {header.architecture} has no place for tensor {of_layer!r}")
    scaling = header.values.get(f"{header.architecture}.rope.scaling.type", "none")
    unused += [f"rope scaling {scaling!r}"] if scaling != "none" else []
    if dequantised:
        counts = ", ".join(f"{count} in {kind}" for kind, count in dequantised.items())
        announce(logger, f"{header.path.name}: matrices without a kernel, dequantised to {dtype}: {counts}")
    if unused:
        what = f"{header.path.name}: not used, so long texts may suffer: {', '.join(unused)}"
        announce(logger, what, logging.WARNING)


def _refuse(header: Header, what: str) -> NoReturn:
    raise InputError(f"model file {str(header.path)!r}: {what}")
