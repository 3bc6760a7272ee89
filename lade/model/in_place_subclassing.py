"""In-place subclassing: change the class of a layer but keep its weights, names and hooks."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from lade.errors import UnsupportedModelError

HOOKS_REMEDY = "remove them first, accelerate's with accelerate.hooks.remove_hook_from_submodules(model)"


class Changed(nn.Module):
    """Base of the mixins that are added to a layer's class.

    Attributes:
        original: the layer's own class.
    """

    original: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Support `copy.deepcopy` and pickle, which look classes up by name."""
        state: Any = self.__getstate__()  # type: ignore[no-untyped-call]
        mixed_in = type(self).__mro__[1]
        return _unpickled, (mixed_in, self.original), state


def change(layer: nn.Module, mixed_in: Any) -> None:
    """Mix a class into a layer's class.

    Raises:
        UnsupportedModelError: the layer has an instance attribute `forward`, which the new class would not affect.
    """
    kind: Any = type(layer)
    if has_own_forward(layer):
        raise UnsupportedModelError(f"a layer, {kind.__name__}, has hooks, of accelerate or others", HOOKS_REMEDY)
    _drop_bound_forward(layer)
    layer.__class__ = _mixed(mixed_in, kind)


def restore(model: nn.Module) -> None:
    """Restore the original classes of all layers of a model.

    Raises:
        UnsupportedModelError: a layer has a `forward` of its own, from hooks added since. No layer is changed then.
    """
    changed = {name: layer for name, layer in model.named_modules() if isinstance(layer, Changed)}
    for name, layer in changed.items():
        if has_own_forward(layer):
            raise UnsupportedModelError(f"layer {name!r} has hooks, of accelerate or others", HOOKS_REMEDY)
    for layer in changed.values():
        _drop_bound_forward(layer)
        layer.__class__ = layer.original


def has_own_forward(layer: nn.Module) -> bool:
    """Return whether a layer has an instance attribute `forward` of its own, such as that of accelerate's hooks.

    Such a function may be bound to the class of the time it was made. When accelerate removes its hooks it leaves the
    class's own `forward` as an instance attribute, which does not count.
    """
    own = vars(layer).get("forward")
    return hasattr(layer, "_hf_hook") or (own is not None and not _is_bound_forward(layer, own))


def _is_bound_forward(layer: nn.Module, forward: Any) -> bool:
    return getattr(forward, "__self__", None) is layer and forward.__func__ is type(layer).forward


def _drop_bound_forward(layer: nn.Module) -> None:
    """Remove an instance attribute that is just the class's `forward`: the new class has another one."""
    if _is_bound_forward(layer, vars(layer).get("forward")):
        del vars(layer)["forward"]


def own_class(layer: nn.Module) -> Any:
    """Return the class of a layer; the original one if it is changed."""
    return layer.original if isinstance(layer, Changed) else type(layer)


@cache
def _mixed(mixed_in: Any, kind: Any) -> Any:
    # By name and module transformers knows what a class's `output_hidden_states` are.
    return type(kind.__name__, (mixed_in, kind), {"original": kind, "__module__": kind.__module__})


def _unpickled(mixed_in: Any, kind: Any) -> Any:
    mixed = _mixed(mixed_in, kind)
    return mixed.__new__(mixed)
