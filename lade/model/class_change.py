"""Layers that become something else in place: the same objects, with the same weights, names and hooks."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn


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
    """Mix a class into that of a layer."""
    kind: Any = type(layer)
    layer.__class__ = _mixed(mixed_in, kind)


def restore(model: nn.Module) -> None:
    """Give all layers of a model the classes that they had."""
    for layer in model.modules():
        if isinstance(layer, Changed):
            layer.__class__ = layer.original


def own_class(layer: nn.Module) -> Any:
    """The class of a layer, also of one that is changed meanwhile."""
    return layer.original if isinstance(layer, Changed) else type(layer)


@cache
def _mixed(mixed_in: Any, kind: Any) -> Any:
    return type(kind.__name__, (mixed_in, kind), {"original": kind, "__module__": mixed_in.__module__})


def _revived(mixed_in: Any, kind: Any) -> Any:
    mixed = _mixed(mixed_in, kind)
    return mixed.__new__(mixed)
