"""In-place subclassing: change the class of a layer and keep its weights, names and hooks."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from lade.errors import UnsupportedModelError

HOOKS_REMEDY = "remove them first, accelerate's with accelerate.hooks.remove_hook_from_submodules(model)"


class Changed(nn.Module):
    """Base of what is mixed into the class of a layer.

    Attributes:
        original: the class that it is mixed into.
    """

    original: Any

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For `copy.deepcopy` and pickle, which find a class by its name."""
        state: Any = self.__getstate__()  # type: ignore[no-untyped-call]
        mixed_in = type(self).__mro__[1]
        return _revived, (mixed_in, self.original), state


def change(layer: nn.Module, mixed_in: Any) -> None:
    """Mix a class into that of a layer.

    Raises:
        UnsupportedModelError: it has a `forward` of its own, which would go on as before.
    """
    kind: Any = type(layer)
    if has_own_forward(layer):
        raise UnsupportedModelError(f"a layer, {kind.__name__}, has hooks, of accelerate or of others", HOOKS_REMEDY)
    _forget_bound_forward(layer)
    layer.__class__ = _mixed(mixed_in, kind)


def restore(model: nn.Module) -> None:
    """Give all layers of a model the classes that they had.

    Raises:
        UnsupportedModelError: one has a `forward` of its own, of hooks that came since. None is changed then.
    """
    changed = {name: layer for name, layer in model.named_modules() if isinstance(layer, Changed)}
    for name, layer in changed.items():
        if has_own_forward(layer):
            raise UnsupportedModelError(f"layer {name!r} has hooks, of accelerate or of others", HOOKS_REMEDY)
    for layer in changed.values():
        _forget_bound_forward(layer)
        layer.__class__ = layer.original


def has_own_forward(layer: nn.Module) -> bool:
    """Whether a layer has a `forward` beside its class's, such as the one of accelerate's hooks.

    It may hold on to what the class was when it was made. Where accelerate has removed its hooks, it leaves the class's
    own behind as an attribute, which counts for none.
    """
    own = vars(layer).get("forward")
    return hasattr(layer, "_hf_hook") or (own is not None and not _is_bound_forward(layer, own))


def _is_bound_forward(layer: nn.Module, forward: Any) -> bool:
    return getattr(forward, "__self__", None) is layer and forward.__func__ is type(layer).forward


def _forget_bound_forward(layer: nn.Module) -> None:
    """Forget what is an attribute of a layer, and its class's `forward` all the same: another class has another one."""
    if _is_bound_forward(layer, vars(layer).get("forward")):
        del vars(layer)["forward"]


def own_class(layer: nn.Module) -> Any:
    """The class of a layer, also of one that is changed meanwhile."""
    return layer.original if isinstance(layer, Changed) else type(layer)


@cache
def _mixed(mixed_in: Any, kind: Any) -> Any:
    return type(kind.__name__, (mixed_in, kind), {"original": kind, "__module__": mixed_in.__module__})


def _revived(mixed_in: Any, kind: Any) -> Any:
    mixed = _mixed(mixed_in, kind)
    return mixed.__new__(mixed)
