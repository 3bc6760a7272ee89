"""Facts about a model for one call: modules, forward signature, weights, hooks and foreign code.

Before a call can be served, a dozen things have to be known about its model: adapters, hooks, replaced forwards,
quantised layers, indexers, recurrent layers, training mode. All of them may change from one call to the next without a
word: `load_adapter`, `train`, `module.forward = ...`, `to(dtype)`. So nothing is remembered from an earlier call.
Instead a call walks through the modules once, `ModelFacts.of`, and hands the result on to all that ask.

**Foreign code.** What the tests say about a listed architecture holds for transformers' own code. A tracer, a profiler,
a kernel library or a user's hook may swallow the positions of a tree, or look at the last token of a pass only. So a
model that carries such code is checked like one of an unknown architecture.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.generation import utils as generation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lade.model import joint
from lade.model.cache_layers import Recurrence
from lade.model.config import Positions

CACHE_NAMES = ("past_key_values", "cache_params")
"""What models call the argument that takes their cache; the latter those whose layers are all recurrent."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class _Arguments(NamedTuple):
    """Names that a function gives its arguments, and whether it takes others, too."""

    names: frozenset[str]
    takes_any: bool


_known: WeakKeyDictionary[Callable[..., Any], _Arguments] = WeakKeyDictionary()


def accepted(model: PreTrainedModel) -> frozenset[str]:
    """Arguments that can be passed to `forward` by name and mean something there.

    Those that it names itself; and if it takes any (`**kwargs`), as tracers and profilers do, those that the class, one
    of its bases, or the base model names. Whether they arrive is for the check of the model to find out.
    """
    own = _arguments(model.forward)
    return own.names.union(*(_arguments(forward).names for forward in _forwards(model))) if own.takes_any else own.names


def cache_name(model: PreTrainedModel) -> str | None:
    """What the model calls the argument that takes its cache; None where it is none of the names that we know."""
    names = accepted(model)
    return next((name for name in CACHE_NAMES if name in names), None)


def _forwards(model: PreTrainedModel) -> Iterator[Callable[..., Any]]:
    """All that a wrapper may hand its arguments on to."""
    for module in (model, model.base_model):
        yield from (vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))


def _arguments(forward: Callable[..., Any]) -> _Arguments:
    """Those of a function, or of the function behind a method, `self` included; read once, which takes a while."""
    function = getattr(forward, "__func__", forward)
    try:
        found = _known.get(function)
    except TypeError:  # what is no function may not be hashed, or not be held weakly
        return _read(function)
    if found is None:
        found = _known[function] = _read(function)
    return found


def _read(function: Callable[..., Any]) -> _Arguments:
    parameters = inspect.signature(function).parameters.values()
    names = frozenset(parameter.name for parameter in parameters if parameter.kind in _BY_NAME)
    return _Arguments(names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters))


def parts_of(weight: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a weight wraps, such as codes and scales, however deep; the weight itself if it wraps none."""
    flatten: Any = getattr(weight, "__tensor_flatten__", None)  # PyTorch's protocol for tensors that wrap others
    if flatten is None:
        yield weight
        return
    names, _ = flatten()
    parts = [getattr(weight, name) for name in names]
    for part in parts:
        if isinstance(part, torch.Tensor):  # a split weight names its group of processes, too
            yield from parts_of(part)


def bytes_by_kind(weights: Iterable[torch.Tensor]) -> dict[str, int]:
    """Bytes in memory by the class of the weight and the dtype it passes for, such as "Parameter float32"."""
    found: dict[tuple[type, torch.dtype], int] = {}
    for weight in weights:
        kind, wraps = (type(weight), weight.dtype), type(weight) is not torch.nn.Parameter
        nbytes = sum(part.nbytes for part in parts_of(weight)) if wraps else weight.nbytes
        found[kind] = found.get(kind, 0) + nbytes
    named: dict[str, int] = {}
    for (kind_of, dtype), nbytes in found.items():  # classes of several libraries may have one name
        name = f"{kind_of.__name__} {dtype}".replace("torch.", "")
        named[name] = named.get(name, 0) + nbytes
    return named


TRUSTED = frozenset({"accelerate", "lade", "peft", "torch", "transformers"})
"""Packages whose wrappers and hooks hand on what they are given."""
_METHODS = ("forward", "prepare_inputs_for_generation")
RECURRENT_FUNCTIONS = (
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "mamba2_chunk_scan",
    "mamba_selective_scan",
)
"""What transformers' mixers call for several tokens, by the name under which their module knows it."""
_INDEXER_ARGUMENTS = {"hidden_states", "attention_mask", "past_key_values"}


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """What a model is made of at one moment, and what follows from it, found out when it is first asked for.

    Attributes:
        model: the model, itself one of the modules.
        modules: all of them, each once, from the outside in.
        kinds: the same by their class.
        hooked: those with hooks before or after their `forward`.
        replaced: those with a `forward` of their own beside that of their class, also under accelerate's hooks.
        compiled: those that `torch.compile` compiles in place.
        training: whether any of them is in training mode.
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
        """Look at a model, some 0.3 us for each module."""
        modules, met, training = [model], {id(model)}, False
        kinds: dict[type[nn.Module], list[nn.Module]] = {}
        hooked, replaced, compiled = list[nn.Module](), list[nn.Module](), list[nn.Module]()
        for module in modules:  # which gets longer meanwhile
            state, kind = module.__dict__, type(module)
            if kind in kinds:
                kinds[kind].append(module)
            else:
                kinds[kind] = [module]
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
        """Modules with an attribute that is no module, parameter or buffer: `hasattr` is slow where there is none."""
        found = list[nn.Module]()
        for kind, modules in self.kinds.items():
            if hasattr(kind, name):
                found += modules
            elif kind.__getattr__ is nn.Module.__getattr__:
                found += [module for module in modules if name in vars(module)]
            else:  # a wrapper that hands on what it is asked for
                found += [module for module in modules if hasattr(module, name)]
        return found

    @cached_property
    def weights(self) -> list[torch.Tensor]:
        """All parameters, each once."""
        found = [weight for module in self.modules for weight in module._parameters.values() if weight is not None]
        return list({id(weight): weight for weight in found}.values())

    @cached_property
    def text_config(self) -> PretrainedConfig:
        """The configuration of the language model, which a multimodal model holds as a part."""
        config: PretrainedConfig = self.model.config.get_text_config(decoder=True)
        return config

    @cached_property
    def positions(self) -> Positions:
        """Where its table of positions ends, or its rotary frequencies change."""
        return Positions.of(self.text_config)

    @cached_property
    def accepts(self) -> frozenset[str]:
        """Names of the arguments that mean something to its forward pass."""
        return accepted(self.model)

    @cached_property
    def cache_name(self) -> str | None:
        """Under which name its forward takes the cache; None for none of those that are known."""
        return cache_name(self.model)

    @cached_property
    def indexers(self) -> list[Any]:
        """Modules that pick single keys for attention; those that pool keys have other fields beside `index_topk`."""
        return [part for part in self.having("index_topk") if _picks_single_keys(part)]

    @cached_property
    def recurrent_functions(self) -> list[tuple[ModuleType, str]]:
        """The functions for several tokens that its recurrent layers call: where each is looked up, and its name."""
        names = sorted({kind.__module__ for kind in self.kinds})
        modules = [sys.modules[name] for name in names if name in sys.modules]
        found = [(module, name) for module in modules for name in RECURRENT_FUNCTIONS if hasattr(module, name)]
        return found if found and has_states(self.model.config) else []

    @property
    def recurrent(self) -> bool:
        """Whether it has recurrent layers whose functions are known."""
        return bool(self.recurrent_functions)

    @cached_property
    def recurrence(self) -> Recurrence | None:
        """How its recurrent layers take part in passes over trees; None without such layers."""
        found: Recurrence | None = joint.load("recurrent").of(self) if self.recurrent else None
        return found

    @property
    def has_encoder(self) -> bool:
        """Whether it is an encoder-decoder model."""
        return bool(self.model.config.is_encoder_decoder)

    @cached_property
    def foreign(self) -> list[Any]:
        """Functions, hooks and classes that take part in a pass and come from none of the trusted packages.

        So do configurations that are not the model's: what is read in that one, a layer may not go by. Linear layers of
        other makes are none of them, as each is tried by itself.
        """
        config = self.text_config
        found = [
            *_attention_of(config),
            *_hooks(vars(torch_module), "_global_forward_hooks", "_global_forward_pre_hooks"),
        ]
        found.extend([vars(self.model).get(name) for name in _METHODS])
        for state in map(vars, (*self.replaced, *self.hooked)):
            found.extend((state.get("forward"), state.get("_hf_hook")))  # the latter is called by accelerate's forward
            found.extend(_hooks(state, "_forward_hooks", "_forward_pre_hooks"))
        kinds = self.kinds
        found.extend(
            _of_classes([kind for kind in kinds if _is_trusted(kind) or not _is_tried_by_itself(kinds[kind][0])])
        )
        configs = [vars(module).get("config") for module in self.modules]
        strays = [own for own in configs if isinstance(own, PretrainedConfig) and own is not config]
        return strays + [thing for thing in found if thing is not None and not _is_trusted(thing)]


def compiled_call(module: nn.Module) -> Any:
    """What `torch.compile` has made of a module, by `module.compile()` or as its `forward`; None for nothing."""
    forward = vars(module).get("forward")
    return module._compiled_call_impl or (forward if hasattr(forward, "_torchdynamo_orig_callable") else None)


def is_one_graph(module: nn.Module) -> bool:
    """Whether a module was compiled with `fullgraph=True`, as far as what compiles it can be asked."""
    cells = getattr(compiled_call(module), "__closure__", None) or ()
    return any(getattr(cell.cell_contents, "fullgraph", False) is True for cell in cells)


def has_states(config: PretrainedConfig) -> bool:
    """Whether any layer is recurrent: families that have such layers may also be built without."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in DynamicCache(config=config).layers)


def _picks_single_keys(part: Any) -> bool:
    picks = isinstance(part.index_topk, int) and not hasattr(part, "index_kpool")
    return picks and set(inspect.signature(type(part).forward).parameters) > _INDEXER_ARGUMENTS


def _of_classes(kinds: Sequence[type]) -> list[Any]:
    """The classes, and their methods: these may have been replaced in classes of trusted packages."""
    bases = dict.fromkeys(chain.from_iterable([kind.__mro__ for kind in kinds]))
    return [*kinds, *[vars(base).get(name) for base in bases for name in _METHODS]]


def _attention_of(config: PretrainedConfig) -> Iterator[Any]:
    """The functions of the attention implementation."""
    yield ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
    yield torch.nn.functional.scaled_dot_product_attention


def _hooks(state: Mapping[str, Any], *tables: str) -> Iterator[Any]:
    return chain.from_iterable(state[table].values() for table in tables)


def _is_tried_by_itself(module: nn.Module) -> bool:
    """Whether it is a linear layer, or an embedding, which only looks up."""
    return hasattr(module, "in_features") or hasattr(module, "num_embeddings")


def _is_trusted(thing: Any) -> bool:
    """Whether a class or a callable is defined in a trusted package, and so is all that it wraps."""
    if type(thing) is FunctionType and not thing.__dict__:  # most are
        return str(thing.__globals__.get("__name__")).partition(".")[0] in TRUSTED
    if isinstance(thing, type):  # which wraps nothing
        return str(thing.__module__).partition(".")[0] in TRUSTED
    return _home(thing).partition(".")[0] in TRUSTED and all(map(_is_trusted, _wrapped_by(thing)))


def _home(thing: Any) -> str:
    """The module that defines it. A function may bear the name of another one's module (`functools.wraps`)."""
    match thing:
        case partial():
            return _home(thing.func)
        case MethodType():
            return _home(thing.__func__)
        case FunctionType():
            return str(thing.__globals__.get("__name__"))
        case type() | BuiltinFunctionType():
            return str(thing.__module__)
    return type(thing).__module__


def _wrapped_by(thing: Any) -> Iterator[Any]:
    """What a callable hands its arguments on to, as far as it says so."""
    if isinstance(thing, type):
        return
    if isinstance(thing, MethodType):
        thing = thing.__func__
    if type(thing).__module__ == "accelerate.hooks":
        yield from getattr(thing, "hooks", ())  # of a SequentialHook
    if hasattr(thing, "__wrapped__"):
        yield thing.__wrapped__


TENSOR_PARALLEL_HOME = "transformers.distributed.tensor_parallel"
"""The module whose functions replace the forwards of layers that are split over processes."""
INVARIANCE = "batch_invariance"
"""The attribute by which `lade.invariant` marks a model."""


def tensor_parallel_size(model: Any) -> int:
    """Over how many processes its layers are split; 1 where they are not."""
    return getattr(model, "_tp_size", None) or 1


def is_tensor_parallel(forward: Any) -> bool:
    """Whether a forward that a module has of its own is one of transformers' for a split layer."""
    return getattr(forward, "__module__", "") == TENSOR_PARALLEL_HOME


def in_step(model: Any) -> bool:
    """Whether all processes have to make as many passes, as `model.generate` finds it out."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    asked: Any = generation
    return several and bool(asked.is_deepspeed_zero3_enabled() or asked.is_fsdp_managed_module(model))


def is_invariant(model: nn.Module) -> bool:
    """Whether `lade.invariant` has made the model's rows round alike in every pass."""
    return vars(model).get(INVARIANCE) is not None
