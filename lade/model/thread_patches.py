"""Hooks and attribute overrides that affect the calling thread only.

A module runs its hooks in whichever thread calls it. The hooks here do nothing in other threads than the one that
registered them, and nothing at all once they are removed, not even in a copy of the module made in the meantime.

    module.attribute = Override     to a thread inside `overridden`: a value of its own
                                    to all others: the original attribute

The first thread that needs an override installs it, and the last one removes it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from torch import nn

from lade.locks import ForkSafeLock

Before = Callable[[tuple[Any, ...], dict[str, Any]], None]
After = Callable[[Any], Any]


@contextmanager
def hooked(module: nn.Module, *, before: Before | None = None, after: After | None = None) -> Iterator[None]:
    """Observe the calls of a module by this thread, while the context lasts.

    Args:
        module: the module, which other threads may call too.
        before: called with the arguments of each call, positional and named; None for no hook.
        after: called with each result, and may return a replacement; None for no hook.
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
    """Replaces a flag or function that has a different value in some threads.

    Args:
        original: the value for the other threads and for copies of the module.
        inherited: whether the module inherits the original from its class.

    Attributes:
        threads: number of threads with a value of their own.
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
    """Give this thread another value of an attribute while the context lasts.

    Args:
        module: an nn.Module, or a Python module whose functions look the attribute up; other threads may use it too.
        name: name of the attribute, which is a flag or a function.
        own: maps the original value to this thread's.

    Raises:
        RuntimeError: the attribute is overridden in this thread already.
    """
    override = _install(module, name)
    try:
        with override.own(own(override.original)):
            yield override
    finally:
        _uninstall(module, name, override)


def _install(module: nn.Module | ModuleType, name: str) -> Override:
    with _changing:
        override = vars(module).get(name)
        if not isinstance(override, Override):
            override = Override(getattr(module, name), inherited=name not in vars(module))
            setattr(module, name, override)
        elif override.is_own():
            raise RuntimeError("a pass over a tree began inside another one of the same model and thread")
        override.threads += 1
        return override


def _uninstall(module: nn.Module | ModuleType, name: str, override: Override) -> None:
    with _changing:
        override.threads -= 1
        if override.threads or vars(module).get(name) is not override:
            return
        if override.inherited:
            delattr(module, name)
        else:
            setattr(module, name, override.original)
