"""Changes of a module in place: hooks and attribute overrides for the calling thread only, and another class.

A module runs its hooks in whichever thread calls it. The hooks here do nothing in other threads than the one that
registered them, and nothing at all once they are removed, not even in a copy of the module made in the meantime.

    module.attribute = Override     to a thread inside `overridden`: a value of its own
                                    to all others: the original attribute

The first thread that needs an override installs it, and the last one removes it. A layer whose class is changed keeps
its weights, names and hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any

from torch import nn

from lade.errors import UnsupportedModelError
from lade.locks import ForkSafeLock

Before = Callable[[tuple[Any, ...], dict[str, Any]], None]
After = Callable[[Any], Any]


@contextmanager
def hooked(module: nn.Module, *, before: Before | None = None, after: After | None = None) -> Iterator[None]:
    """Observe the calls of a module by this thread, while the context lasts; other threads may call it too.

    `before` is called with the arguments of each call, positional and named, `after` with each result, for which it may
    return a replacement.
    """
    here = threading.local()
    here.active = True

    def pre_hook(module: Any, args: Any, kwargs: Any = None) -> None:
        # A thread that runs hooks while this one is being removed may call it without `kwargs`.
        if before is not None and getattr(here, "active", False):
            before(args, kwargs)

    def post_hook(module: Any, args: Any, output: Any) -> Any:
        return after(output) if after is not None and getattr(here, "active", False) else None

    with ExitStack() as stack:
        if before is not None:
            stack.callback(module.register_forward_pre_hook(pre_hook, with_kwargs=True).remove)
        if after is not None:
            stack.callback(module.register_forward_hook(post_hook).remove)
        stack.callback(setattr, here, "active", False)
        yield


class Override:
    """Replaces a flag or function that has a different value in some threads, `threads` of them.

    The original, which the module may have inherited from its class, stays the value for other threads and for copies
    of the module.
    """

    def __init__(self, original: Any, *, inherited: bool) -> None:
        self.original, self.inherited = original, inherited
        self.threads = 0
        self._here = threading.local()

    @property
    def used(self) -> bool:
        """True if this thread has read its own value."""
        return getattr(self._here, "used", False)

    @contextmanager
    def own(self, value: Any) -> Iterator[None]:
        """Set this thread's own value while the context lasts."""
        self._here.value, self._here.used = value, False
        try:
            yield
        finally:
            del self._here.value, self._here.used

    def is_own(self) -> bool:
        """Return whether this thread has its own value."""
        return hasattr(self._here, "value")

    def _current(self) -> Any:
        if not self.is_own():
            return self.original
        self._here.used = True
        return self._here.value

    def __bool__(self) -> bool:
        return bool(self._current())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of the calling thread."""
        return self._current()(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (self.original,)


def _identity(original: Any) -> Any:
    return original


_changing = ForkSafeLock()


@contextmanager
def overridden(module: nn.Module | ModuleType, name: str, own: Callable[[Any], Any]) -> Iterator[Override]:
    """Give this thread another value of an attribute, a flag or a function, while the context lasts.

    Args:
        module: an nn.Module, or a Python module whose functions look the attribute up; other threads may use it too.
        name: name of the attribute.
        own: maps the original value to this thread's.

    Raises:
        RuntimeError: the attribute is overridden in this thread already.
    """
    with _changing:
        override = vars(module).get(name)
        if not isinstance(override, Override):
            override = Override(getattr(module, name), inherited=name not in vars(module))
            setattr(module, name, override)
        elif override.is_own():
            raise RuntimeError("a pass over a tree began inside another one of the same model and thread")
        override.threads += 1
    try:
        with override.own(own(override.original)):
            yield override
    finally:
        with _changing:
            override.threads -= 1
            is_last = not override.threads and vars(module).get(name) is override
            if is_last and override.inherited:
                delattr(module, name)
            elif is_last:
                setattr(module, name, override.original)


HOOKS_REMEDY = "remove them first, accelerate's with accelerate.hooks.remove_hook_from_submodules(model)"


class Changed(nn.Module):
    """Base of the mixins that are added to a layer's class; `original` is the layer's own class."""

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
