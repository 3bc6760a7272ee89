"""Trials of an invariant model, bit for bit: attention order, and tree passes against single tokens; and kept verdicts.

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
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from lade.backends.cpu.invariant.attention import PlacedMask, invariant_attention
from lade.backends.cpu.invariant.weights import RowPadding
from lade.backends.trials.tree_check import PlainDecoding, nodes_of
from lade.decoding.tree import ROOT, TokenTree
from lade.files import Records
from lade.model.config import decoder_config, token_embeddings
from lade.model.inputs import FULL, MaskPlan, StepInputs
from lade.model.kv_cache import TreeCache
from lade.model.runner import EagerRunner
from lade.native import library_path, processor_name
from lade.version import __version__

TEXTS = (1, 17, 60, 64, 130, 257, 700)  # numbers of cached tokens in the attention trial
_NODES, _DEPTH = 40, 9
PATHS = ((0, 1, 2, 3, 4, 5), (0, 1, 6, 7), (8, 9), (8, 10, 11), (12,))
"""Paths of the trial's tree, as indices into random tokens."""
KEPT = PATHS[1]  # its keys must move forward
FOLLOWING = 13
ROWS = 4  # rows of the batch trial; few paddings are multiples of it
NO_MODULE = "no module by itself"
Outputs = list[tuple[str, torch.Tensor]]  # outputs of the modules of a model in call order, with their names


class Heads(NamedTuple):
    """Numbers of query and KV heads of a layer, and the size of keys and values."""

    queries: int
    keys: int
    size: int


@torch.no_grad()
def attention_keeps_order(heads: Heads) -> bool:
    """Return True if attention gives tree nodes the bits of single tokens, and a text those of its pieces.

    The trial is in float32, in which 16-bit models sum as well: there, rounding hides no difference.
    """
    generator = torch.Generator().manual_seed(0)
    return all(_agrees(heads, text, generator) for text in TEXTS)


def _agrees(heads: Heads, text: int, generator: torch.Generator) -> bool:
    tree = random_tree(_NODES, _DEPTH, generator)
    shape = text + len(tree), heads.size
    query, key, value = states = [
        torch.randn(1, count, *shape, generator=generator, dtype=torch.float32, device="cpu")
        for count in (heads.queries, heads.keys, heads.keys)
    ]
    inputs = StepInputs.of([tree], [text], torch.device("cpu"))
    mask = PlacedMask.of(inputs.mask(FULL), inputs.key_positions)
    found = _attention(query[:, :, text:], key, value, mask)
    for node, ancestors in enumerate(tree.closure()):
        path = [*range(text), *(text + np.flatnonzero(ancestors))]
        alone = _attention(query[:, :, [text + node]], key[:, :, path], value[:, :, path])
        if not torch.equal(alone[:, 0], found[:, node]):
            return False
    return _agrees_in_pieces(*(each[:, :, :text] for each in states))


def _agrees_in_pieces(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return True if a text, `[1, heads, T, size]`, gets the same bits whole and in two pieces."""
    middle = query.shape[2] // 3 + 1
    first = _attention(query[:, :, :middle], key[:, :, :middle], value[:, :, :middle])
    second = _attention(query[:, :, middle:], key, value) if middle < query.shape[2] else first[:, :0]
    return torch.equal(torch.cat([first, second], 1), _attention(query, key, value))


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: PlacedMask | None = None
) -> torch.Tensor:
    return invariant_attention(torch.nn.Identity(), query, key, value, mask)[0]


def random_tree(nodes: int, deepest: int, generator: torch.Generator) -> TokenTree:
    """Return a random tree with `nodes` nodes and a path of depth `deepest`."""
    tree = TokenTree(0, max_depth=deepest)
    tree.add_path(range(1, deepest + 1), "pool")
    while len(tree) < nodes:
        parent = int(torch.randint(len(tree), (), generator=generator, dtype=torch.int64, device="cpu"))
        tree.add(parent, len(tree), "pool")
    return tree


class ModelTrial:
    """A text of some tokens followed by a tree, on which passes of an invariant model are compared."""

    def __init__(self, model: PreTrainedModel, plan: MaskPlan, tokens: int) -> None:
        generator = torch.Generator().manual_seed(tokens)
        vocabulary: int = token_embeddings(model).weight.shape[0]
        ids = torch.randint(vocabulary, (tokens,), generator=generator, dtype=torch.int64, device="cpu").tolist()
        distinct = torch.randperm(vocabulary, generator=generator, dtype=torch.int64, device="cpu")
        nodes = distinct.repeat(FOLLOWING + 1)[: FOLLOWING + 1].tolist()
        self._model, self._text, self._following = model, ids, nodes[FOLLOWING]
        self._paths = [tuple(nodes[i] for i in path) for path in PATHS]
        self._kept = tuple(nodes[i] for i in KEPT)
        self._runner = EagerRunner(model, plan, model.generation_config)
        self._tree = TokenTree(ids[-1])
        for path in self._paths:
            self._tree.add_path(path, "pool")

    @torch.no_grad()
    def first_mismatch(self) -> str | None:
        """Return the first module whose output differs between tree and single tokens; None if all logits are equal."""
        cache = self._prefilled()
        logits = self._runner.forward([self._tree], [self._text], cache)[0]  # [S, V]
        plain: dict[tuple[int, ...], PlainDecoding] = {(): PlainDecoding(self._model, self._text)}
        for path in [whole[:depth] for whole in self._paths for depth in range(len(whole) + 1)]:
            if path not in plain:
                plain[path] = plain[path[:-1]].after(path[-1])
            if not torch.equal(plain[path].logits, logits[nodes_of(self._tree, path)[-1]]):
                return self._first_module(path)
        cache.keep([nodes_of(self._tree, self._kept)], fed=len(self._tree))
        text = [*self._text, *self._kept, self._following]
        after = self._runner.forward([TokenTree(self._following)], [text], cache)[0, ROOT]
        expected = plain[self._kept].after(self._following).logits
        return None if torch.equal(expected, after) else "the cache after an accepted path"

    @torch.no_grad()
    def first_batch_mismatch(self) -> str | None:
        """Return the first module whose output differs if the text is one row of a batch; None if there is none."""
        with recorded(self._model) as alone:
            single = PlainDecoding(self._model, self._text)
        with recorded(self._model) as together:
            batched = PlainDecoding(self._model, self._text, rows=ROWS)
        same = torch.equal(single.prompt_logits, batched.prompt_logits)
        if same and torch.equal(single.logits, batched.logits):
            return None
        tokens = len(self._text) - 1
        in_prompt = first_difference(alone, together, TokenIndex(1, tokens), TokenIndex(ROWS, tokens))
        return in_prompt or first_difference(alone, together, TokenIndex(1, 1), TokenIndex(ROWS, 1)) or NO_MODULE

    def _prefilled(self) -> TreeCache:
        cache = self._runner.tree_cache()
        self._runner.prefill([self._text[:-1]], cache)
        return cache

    def _first_module(self, path: Sequence[int]) -> str:
        """Return the first module whose output at the end of a path differs in the tree."""
        cache = self._prefilled()
        with recorded(self._model) as of_tree:
            self._runner.forward([self._tree], [self._text], cache)
        plain = PlainDecoding(self._model, self._text[:-1]) if not path else PlainDecoding(self._model, self._text)
        for token in path[:-1]:
            plain = plain.after(token)
        with recorded(self._model) as of_token:
            plain.after(path[-1] if path else self._text[-1])
        places = TokenIndex(1, 1), TokenIndex(1, len(self._tree), nodes_of(self._tree, path)[-1])
        return first_difference(of_token, of_tree, *places) or NO_MODULE


@contextmanager
def distinct_layers(model: PreTrainedModel) -> Iterator[None]:
    """Leave a model its first layers, up to the last that differs in structure from all before, in the context.

    Layers of one structure run the same kernels on weights of the same shapes, so that one is tried for all of them.
    Models whose layers are not found are tried whole.
    """
    decoder = model.get_decoder()
    many = decoder_config(model).num_hidden_layers
    found = [(name, part) for name, part in decoder.named_children() if isinstance(part, nn.ModuleList)]
    stacks = [(name, layers) for name, layers in found if len(layers) == many]
    if len(stacks) != 1:
        yield
        return
    ((name, layers),) = stacks
    kinds = [tuple((inner, *kind_of(module)) for inner, module in layer.named_modules()) for layer in layers]
    needed = 1 + max(index for index, kind in enumerate(kinds) if kind not in kinds[:index])
    few = layers[:needed]
    few.training = layers.training  # a new list is in training mode
    try:
        decoder._modules[name] = few
        yield
    finally:
        decoder._modules[name] = layers


@contextmanager
def recorded(model: nn.Module) -> Iterator[Outputs]:
    """Record the output of every module while the context lasts."""
    outputs: Outputs = []

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) and output else output
        if isinstance(first, torch.Tensor):
            outputs.append((name, first.clone()))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(partial(note, name)).remove)
        yield outputs


class TokenIndex(NamedTuple):
    """Index of a token in a pass over `[rows, tokens]`: `token` of the last row, the last one by default."""

    rows: int
    tokens: int
    token: int = -1

    def of(self, states: torch.Tensor) -> torch.Tensor | None:
        """Return the token's part of an output `[rows, tokens, ...]` or `[rows * tokens, ...]`; None for others."""
        if states.ndim > 1 and states.shape[:2] in ((self.rows, self.tokens), (self.rows, 1)):
            return states[-1, self.token if states.shape[1] == self.tokens else -1]
        if states.ndim and states.shape[0] == self.rows * self.tokens:
            found: torch.Tensor = states.unflatten(0, (self.rows, self.tokens))[-1, self.token]
            return found
        return None


def first_difference(alone: Outputs, together: Outputs, place: TokenIndex, place_together: TokenIndex) -> str | None:
    """Return the first module whose result for a token differs between two passes; None if there is none."""
    for (name, one), (_, other) in zip(alone, together, strict=False):
        before, after = place.of(one), place_together.of(other)
        if before is not None and after is not None and before.shape == after.shape and not torch.equal(before, after):
            return name
    return None


RECORDS = Records("invariant", "the verdict of invariance trials")
_KNOWN_PACKAGES = ("torch", "transformers", "lade")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def key_of(model: PreTrainedModel) -> dict[str, object] | None:
    """Return what the trials of a model, not invariant yet, depend on; None if its structure does not tell."""
    structure = hashlib.sha256()
    for name, module in model.named_modules():
        if not _is_known(module):
            return None
        structure.update(repr((name, *kind_of(module))).encode())
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):  # of the checkpoint
        config.pop(name, None)
    return {
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "products": [torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()],
        "kernels": _digest_of(library_path()),
        "model": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "structure": structure.hexdigest(),
        "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "lade": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def kind_of(module: nn.Module) -> tuple[object, ...]:
    """Return what tells a module's computation from that of others, without its children and its weights' values."""
    kind = type(module)
    settings = [
        (name, repr(value))
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | torch.dtype) and name not in ("training", "layer_idx")
    ]
    weights = [
        (name, type(weight.data).__name__, tuple(weight.shape), weight.stride(), str(weight.dtype))
        for name, weight in (*module._parameters.items(), *module._buffers.items())
        if weight is not None and weight.layout is torch.strided
    ]
    return f"{kind.__module__}.{kind.__qualname__}", *sorted(settings), *weights


def kept_paddings(key: Mapping[str, object]) -> list[RowPadding | None] | None:
    """Return what trials found under a key; None if none were kept."""
    return RECORDS.load(key, lambda record: [each and RowPadding(*each) for each in record["paddings"]])


def keep_paddings(key: Mapping[str, object], paddings: Sequence[RowPadding | None]) -> None:
    """Keep what trials found under a key."""
    RECORDS.save(key, {"paddings": [each and astuple(each) for each in paddings]})


def _is_known(module: Any) -> bool:
    known = type(module).__module__.partition(".")[0] in _KNOWN_PACKAGES and "forward" not in vars(module)
    return known and not any(vars(module).get(name) for name in _HOOKS)


@cache
def _digest_of(path: Path) -> str:
    """Return a digest of the compiled library, since the order of its sums is the compiler's as well."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
