"""Facts about a model for one call: modules, forward signature, weights, hooks and foreign code.

A call depends on a dozen properties of its model: adapters, hooks, replaced forwards, quantised layers, indexers,
recurrent layers, training mode. Any of them may change silently between calls, by `load_adapter`, `train`,
`module.forward = ...` or `to(dtype)`. So nothing is cached across calls. Instead a call traverses the modules once,
in `ModelFacts.of`, and passes the result on.

**Foreign code.** The tests of a listed architecture cover transformers' own code. A tracer, a profiler, a kernel
library or a user's hook may drop the positions of a tree, or look at only the last token of a pass. So a model with
such code is checked like one of an unknown architecture.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from threading import local
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation import utils as generation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lade.errors import UnsupportedArgumentError
from lade.model.cache_layers import Recurrence
from lade.model.config import Positions
from lade.model.registry import Role

_FORMER_CACHE_NAMES = ("past_key_values", "cache_params")
"""Names of the cache until transformers 5.23, the second in models whose layers are all recurrent."""
CACHE = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else _FORMER_CACHE_NAMES[0]
)
"""Name of the cache in arguments of `generate` and of layers, and in outputs; "cache" from transformers 5.24 on."""
CACHE_NAMES = tuple(dict.fromkeys((CACHE, *_FORMER_CACHE_NAMES)))
"""Names of the cache argument of `forward`, of which a model has one; code of a checkpoint may have a former one."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Surveyed(local):
    """The model's facts that a pass of this thread may rely on, those of its call; None for passes of others."""

    now: ModelFacts | None = None


SURVEYED = _Surveyed()


class _RecurrentLayers(Protocol):
    def of(self, facts: ModelFacts) -> Recurrence: ...


class _PackedLayers(Protocol):
    @property
    def packed_weight(self) -> type[nn.Parameter]: ...
    @property
    def packed_layer(self) -> type[nn.Module]: ...
    @property
    def int8_layer(self) -> type[nn.Module]: ...
    def pack_like(self, module: nn.Module, layer: nn.Module) -> None: ...
    def refuse_autocast(self, model: Any) -> None: ...


class _Adapters(Protocol):
    def adapter_refusal(self, wrapped: Any, facts: ModelFacts) -> str: ...
    def call_values(self, model: nn.Module) -> list[str]: ...
    def remove_call_hooks(self, model: nn.Module) -> None: ...


RECURRENT_LAYERS: Role[_RecurrentLayers] = Role("recurrent layers")
PACKED: Role[_PackedLayers] = Role("packed layers")
ADAPTERS: Role[_Adapters] = Role("adapters")


class _Arguments(NamedTuple):
    """Parameter names of a function, and whether it has `**kwargs`."""

    names: frozenset[str]
    takes_any: bool


_signatures: WeakKeyDictionary[Callable[..., Any], _Arguments] = WeakKeyDictionary()


def accepted_arguments(model: PreTrainedModel) -> frozenset[str]:
    """Return the keyword arguments that have a meaning for `forward`.

    These are the parameters that it names and, if it has `**kwargs`, as tracers and profilers do, those that the class,
    its bases or the base model name. Whether a wrapper forwards them is found by the check of the model.
    """
    own = _arguments(model.forward)
    return own.names.union(*(_arguments(forward).names for forward in _forwards(model))) if own.takes_any else own.names


def cache_name(model: PreTrainedModel) -> str | None:
    """Return the name of the cache argument of `forward`; None if it has none of the known names."""
    names = accepted_arguments(model)
    return next((name for name in CACHE_NAMES if name in names), None)


def as_cache(cache: object) -> Any:
    """Return the keyword argument that gives a cache to `generate`, layers and outputs of this transformers."""
    return {CACHE: cache}


def with_present_cache_name(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `generate` in which a cache has the name that this transformers has for it.

    Raises:
        UnsupportedArgumentError: it is given by two names.
    """
    names = ("cache", *_FORMER_CACHE_NAMES) if CACHE == "cache" else ("cache", CACHE)
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    if len(given) > 1:
        raise UnsupportedArgumentError(f"{' and '.join(given)} are names of one argument", f"give {CACHE} alone")
    rest = {name: value for name, value in arguments.items() if name not in names}
    return {**rest, CACHE: next(iter(given.values()))} if given else rest


def _forwards(model: PreTrainedModel) -> Iterator[Callable[..., Any]]:
    """Yield all functions that a wrapper may forward its arguments to."""
    for module in (model, model.base_model):
        yield from (vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))


def _arguments(forward: Callable[..., Any]) -> _Arguments:
    """Return the parameters of a function or of the function behind a method, `self` included. Results are cached."""
    function = getattr(forward, "__func__", forward)
    try:
        found = _signatures.get(function)
    except TypeError:  # callable objects may not be hashable or weakly referenceable
        return _read(function)
    if found is None:
        found = _signatures[function] = _read(function)
    return found


def _read(function: Callable[..., Any]) -> _Arguments:
    parameters = inspect.signature(function).parameters.values()
    names = frozenset(parameter.name for parameter in parameters if parameter.kind in _BY_NAME)
    return _Arguments(names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters))


def inner_tensors(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a weight wraps, such as codes and scales, recursively; or the weight itself."""
    flatten: Any = getattr(weight, "__tensor_flatten__", None)  # PyTorch's protocol for tensors that wrap others
    if flatten is None:
        yield weight
        return
    names, _ = flatten()
    parts = [getattr(weight, name) for name in names]
    for part in parts:
        if isinstance(part, torch.Tensor):  # a sharded weight lists its process group too
            yield from inner_tensors(part)


def bytes_by_kind(weights: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return bytes in memory by class and nominal dtype of the weights, with names such as "Parameter float32"."""
    found: dict[tuple[type, torch.dtype], int] = {}
    for weight in weights:
        kind, wraps = (type(weight), weight.dtype), type(weight) is not torch.nn.Parameter
        nbytes = sum(part.nbytes for part in inner_tensors(weight)) if wraps else weight.nbytes
        found[kind] = found.get(kind, 0) + nbytes
    named: dict[str, int] = {}
    for (kind_of, dtype), nbytes in found.items():  # classes of several libraries may share a name
        name = f"{kind_of.__name__} {dtype}".replace("torch.", "")
        named[name] = named.get(name, 0) + nbytes
    return named


TRUSTED = frozenset({"accelerate", "lade", "peft", "torch", "transformers"})
"""Packages whose wrappers and hooks forward their arguments unchanged."""
_METHODS = ("forward", "prepare_inputs_for_generation")
RECURRENT_FUNCTIONS = (
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
)
"""Functions that transformers' mixers call for several tokens, by their names in the mixers' modules."""
_INDEXER_ARGUMENTS = {"hidden_states", "attention_mask", CACHE}


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """Properties of a model at one moment; derived ones are computed on first access.

    Attributes:
        model: the model, itself one of the modules.
        modules: all modules, each once, parents before children.
        kinds: the modules by class.
        hooked: modules with forward hooks or forward pre-hooks.
        replaced: modules with an instance attribute `forward`, also beneath accelerate's hooks.
        compiled: modules that `torch.compile` compiles in place.
        training: whether any module is in training mode.
    """

    model: Any
    modules: list[nn.Module]
    kinds: dict[type[nn.Module], list[nn.Module]]
    hooked: list[nn.Module]
    replaced: list[nn.Module]
    compiled: list[nn.Module]
    training: bool

    @classmethod
    def of(cls, model: nn.Module) -> ModelFacts:
        """Survey a model, at some 0.3 us per module."""
        modules, met, training = [model], {id(model)}, False
        kinds: dict[type[nn.Module], list[nn.Module]] = {}
        hooked, replaced, compiled = list[nn.Module](), list[nn.Module](), list[nn.Module]()
        for module in modules:  # the list grows during iteration
            state, kind = module.__dict__, type(module)
            kinds.setdefault(kind, []).append(module)
            if state["_forward_hooks"] or state["_forward_pre_hooks"]:
                hooked.append(module)
            if "forward" in state or "_old_forward" in state:
                replaced.append(module)
            if ("forward" in state or "_compiled_call_impl" in state) and compiled_call(module) is not None:
                compiled.append(module)
            if module.training:
                training = True
            for child in module._modules.values() if module._modules else ():
                if child is not None and id(child) not in met:
                    met.add(id(child))
                    modules.append(child)
        return cls(model, modules, kinds, hooked, replaced, compiled, training)

    def having(self, name: str) -> list[Any]:
        """Return the modules with an attribute other than a module, parameter or buffer; faster than `hasattr`."""
        found = list[nn.Module]()
        for kind, modules in self.kinds.items():
            if hasattr(kind, name):
                found += modules
            elif kind.__getattr__ is nn.Module.__getattr__:
                found += [module for module in modules if name in vars(module)]
            else:  # a wrapper that forwards attribute access
                found += [module for module in modules if hasattr(module, name)]
        return found

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        """All parameters, each once."""
        found = [weight for module in self.modules for weight in module._parameters.values() if weight is not None]
        return list({id(weight): weight for weight in found}.values())

    @cached_property
    def has_only_known_layers(self) -> bool:
        """True if a quick check rules out any foreign layer, as in most models; see `lade.backends.trials`."""
        with_features, weights = self.having("in_features"), self.weights
        linear = self.kinds.get(nn.Linear, [])
        packed = [layer for kind in packed_classes() for layer in self.kinds.get(kind, [])]
        if self.replaced or len(with_features) > len(linear) + len(packed):
            return False
        if [layer for layer in linear if layer._parameters.get("weight") is None]:
            return False
        known = {id(weight) for layer in packed for weight in layer._parameters.values()}
        return not [
            weight
            for weight in weights
            if id(weight) not in known and (type(weight) is not nn.Parameter or weight.dtype.itemsize == 1)
        ]

    @cached_property
    def text_config(self) -> PretrainedConfig:
        """Configuration of the language model, which is a part of a multimodal model."""
        config: PretrainedConfig = self.model.config.get_text_config(decoder=True)
        return config

    @cached_property
    def positions(self) -> Positions:
        """Position limits: the end of its position table, or changes of its rotary frequencies."""
        return Positions.of(self.text_config)

    @cached_property
    def accepts(self) -> frozenset[str]:
        """Keyword arguments that have a meaning for its forward pass."""
        return accepted_arguments(self.model)

    @cached_property
    def cache_name(self) -> str | None:
        """Name of the cache argument of its forward; None if it has none of the known names."""
        return cache_name(self.model)

    @cached_property
    def indexers(self) -> list[Any]:
        """Indexers that select single keys for attention; those that pool keys have fields beside `index_topk`."""
        return [part for part in self.having("index_topk") if _picks_single_keys(part)]

    @cached_property
    def picked_keys(self) -> int | None:
        """Number of keys that an indexer selects for a token; None without indexers."""
        return min((indexer.index_topk for indexer in self.indexers), default=None)

    @cached_property
    def uses_slots(self) -> bool:
        """True if any part may compute with cache slots where a tree needs positions, see `lade.backends.slots`."""
        tempered = getattr(self.text_config, "attn_temperature_tuning", False)
        return bool(self.picked_keys or self.has_alibi or tempered)

    @cached_property
    def has_alibi(self) -> bool:
        """True if its attention adds ALiBi biases, which transformers builds from the mask."""
        return hasattr(self.model.base_model, "build_alibi_tensor")

    @cached_property
    def recurrent_functions(self) -> list[tuple[ModuleType, str]]:
        """Functions for several tokens that its recurrent layers call, as (module of the lookup, name)."""
        names = sorted({kind.__module__ for kind in self.kinds})
        modules = [sys.modules[name] for name in names if name in sys.modules]
        found = [(module, name) for module in modules for name in RECURRENT_FUNCTIONS if hasattr(module, name)]
        # Families with such layers may also be built without.
        layers = DynamicCache(config=self.model.config).layers if found else ()
        return found if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers) else []

    @cached_property
    def recurrent(self) -> bool:
        """True if it has recurrent layers with known functions."""
        return bool(self.recurrent_functions)

    @cached_property
    def recurrence(self) -> Recurrence | None:
        """The handler of its recurrent layers in passes over trees; None without such layers."""
        return RECURRENT_LAYERS.load().of(self) if self.recurrent else None

    @cached_property
    def has_encoder(self) -> bool:
        """True if it is an encoder-decoder model."""
        return bool(self.model.config.is_encoder_decoder)

    @cached_property
    def foreign(self) -> list[Any]:
        """Functions, hooks and classes that take part in a pass and belong to no trusted package.

        Configurations other than the model's count too: a layer may follow one that was not checked. Linear layers of
        other libraries do not count, as each is checked individually.
        """
        config = self.text_config
        found = [
            ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation),
            torch.nn.functional.scaled_dot_product_attention,
            *_hooks(vars(torch_module), "_global_forward_hooks", "_global_forward_pre_hooks"),
        ]
        found.extend([vars(self.model).get(name) for name in _METHODS])
        for state in map(vars, (*self.replaced, *self.hooked)):
            found.extend((state.get("forward"), state.get("_hf_hook")))  # the latter is called by accelerate's forward
            found.extend(_hooks(state, "_forward_hooks", "_forward_pre_hooks"))
        kinds = self.kinds
        relevant = [kind for kind in kinds if _is_trusted(kind) or not _is_checked_individually(kinds[kind][0])]
        found.extend(_classes_and_methods(relevant))
        configs = [vars(module).get("config") for module in self.modules]
        strays = [own for own in configs if isinstance(own, PretrainedConfig) and own is not config]
        return strays + [thing for thing in found if thing is not None and not _is_trusted(thing)]


def compiled_call(module: nn.Module) -> Any:
    """Return the compiled form of a module, from `module.compile()` or as its `forward`; None if there is none."""
    forward = vars(module).get("forward")
    return module._compiled_call_impl or (forward if hasattr(forward, "_torchdynamo_orig_callable") else None)


def is_one_graph(module: nn.Module) -> bool:
    """Return whether a module was compiled with `fullgraph=True`, as far as its compiler tells."""
    cells = getattr(compiled_call(module), "__closure__", None) or ()
    return any(getattr(cell.cell_contents, "fullgraph", False) is True for cell in cells)


def _picks_single_keys(part: Any) -> bool:
    picks = isinstance(part.index_topk, int) and not hasattr(part, "index_kpool")
    return picks and set(inspect.signature(type(part).forward).parameters) > _INDEXER_ARGUMENTS


def _classes_and_methods(kinds: Sequence[type]) -> list[Any]:
    """Return the classes and their methods, which may have been patched in classes of trusted packages."""
    bases = dict.fromkeys(chain.from_iterable([kind.__mro__ for kind in kinds]))
    return [*kinds, *[vars(base).get(name) for base in bases for name in _METHODS]]


def _hooks(state: Mapping[str, Any], *tables: str) -> Iterator[Any]:
    return chain.from_iterable(state[table].values() for table in tables)


def _is_checked_individually(module: nn.Module) -> bool:
    """Return whether it is a linear layer, or an embedding, which only looks up."""
    return hasattr(module, "in_features") or hasattr(module, "num_embeddings")


def _is_trusted(thing: Any) -> bool:
    """Return whether a class or callable, and everything it wraps, is defined in a trusted package."""
    if type(thing) is FunctionType and not thing.__dict__:  # most are, and wrap nothing
        return str(thing.__globals__.get("__name__")).partition(".")[0] in TRUSTED
    wrapped = [thing.__wrapped__] if hasattr(thing, "__wrapped__") and not isinstance(thing, type) else []
    match thing:
        case FunctionType():  # `functools.wraps` does not change its globals
            home = thing.__globals__.get("__name__")
        case type() | BuiltinFunctionType():
            home = thing.__module__
        case MethodType():
            return _is_trusted(thing.__func__)
        case partial():
            home = "torch"  # as what it adds is not code
            wrapped.append(thing.func)
        case _:
            home = type(thing).__module__
            if home == "accelerate.hooks":
                wrapped += getattr(thing, "hooks", ())  # of a SequentialHook
    return str(home).partition(".")[0] in TRUSTED and all(map(_is_trusted, wrapped))


INVARIANCE = "batch_invariance"
"""Attribute with which `lade.invariant` marks a model."""


def tensor_parallel_size(model: Any) -> int:
    """Return the number of processes that the layers are sharded over; 1 if they are not."""
    return getattr(model, "_tp_size", None) or 1


def is_tensor_parallel(forward: Any) -> bool:
    """Return whether an instance's `forward` is one of transformers' for sharded layers."""
    return getattr(forward, "__module__", "") == "transformers.distributed.tensor_parallel"


def needs_synced_passes(model: Any) -> bool:
    """Return whether all processes must make equally many passes, decided as in `model.generate` (`synced_gpus`)."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    asked: Any = generation
    return several and bool(asked.is_deepspeed_zero3_enabled() or asked.is_fsdp_managed_module(model))


def packed_classes() -> tuple[type[nn.Module], ...]:
    """Return the classes of packed layers in the model's dtype."""
    packed = PACKED.loaded()
    return () if packed is None else (packed.packed_layer,)


def adapters() -> _Adapters | None:
    """Return the backend for PEFT's adapters if PEFT is imported; else None, as then no model has any."""
    return ADAPTERS.load() if "peft" in sys.modules else None


def is_invariant(model: nn.Module) -> bool:
    """Return whether `lade.invariant` has made the model batch-invariant."""
    return vars(model).get(INVARIANCE) is not None
