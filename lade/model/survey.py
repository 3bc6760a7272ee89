"""One look at all modules of a model, for all who ask what kinds there are, and what hangs on them.

Before a call can be served, a dozen things have to be known about its model's modules: adapters, hooks, replaced
forwards, quantised layers, indexers, training mode. All of them may change from one call to the next without a word:
`load_adapter`, `train`, `module.forward = ...`, `to(dtype)`. So nothing is remembered from an earlier call. Instead a
call looks once where each asker would look for itself, and the survey is thrown away soon.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class Survey:
    """What a model is made of at one moment.

    Attributes:
        model: the model, itself one of the modules.
        modules: all of them, each once, from the outside in.
        kinds: the same by their class.
        hooked: those with hooks before or after their `forward`.
        replaced: those with a `forward` of their own beside that of their class, also under accelerate's hooks.
        training: whether any of them is in training mode.
    """

    model: Any
    modules: list[nn.Module]
    kinds: dict[type[nn.Module], list[nn.Module]]
    hooked: list[nn.Module]
    replaced: list[nn.Module]
    training: bool

    @classmethod
    def of(cls, model: nn.Module) -> Survey:
        """Look at a model, some 0.3 us for each module."""
        modules, met, training = [model], {id(model)}, False
        kinds: dict[type[nn.Module], list[nn.Module]] = {}
        hooked, replaced = list[nn.Module](), list[nn.Module]()
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
            if module.training:
                training = True
            for child in module._modules.values() if module._modules else ():
                if child is not None and id(child) not in met:
                    met.add(id(child))
                    modules.append(child)
        return cls(model, modules, kinds, hooked, replaced, training)

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
