"""Hooks and attribute overrides that act on the calling thread only.

A module runs its hooks whichever thread calls it. These do nothing but for the thread that registered them, and
nothing at all once they are removed, not even in a copy of the module that was made while they were there.

    module.attribute = Override     to a thread inside `overridden`: a value of its own
                                    to all others: what the attribute was

The first thread that needs it puts it in, and the last one takes it out.
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
    """Watch the calls that this thread makes of a module, while the context lasts.

    Args:
        module: may be called by other threads, too.
        before: is given the arguments of each call, positional and named.
        after: is given what each call returns, and may return something else in its place.
    """
    here = threading.local()
    here.active = True

    def pre_hook(module: Any, args: Any, kwargs: Any = None) -> None:
        # Another thread that is running hooks while this one is removed may call it without `kwargs`.
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
    """Stands for a flag or a function, of which some threads have their own.

    Args:
        original: what it stands for, to the other threads and in copies of the module.
        inherited: whether the module has that from its class.

    Attributes:
        threads: number of threads that have their own.
    """

    def __init__(self, original: Any, *, inherited: bool) -> None:
        self.original, self.inherited = original, inherited
        self.threads = 0
        self._here = threading.local()

    @property
    def used(self) -> bool:
        """Whether this thread has read its own one."""
        return getattr(self._here, "used", False)

    @contextmanager
    def own(self, value: Any) -> Iterator[None]:
        """Give this thread its own while the context lasts."""
        self._here.value, self._here.used = value, False
        try:
            yield
        finally:
            del self._here.value, self._here.used

    def is_own(self) -> bool:
        """Whether this thread has its own."""
        return hasattr(self._here, "value")

    def _current(self) -> Any:
        if not self.is_own():
            return self.original
        self._here.used = True
        return self._here.value

    def __bool__(self) -> bool:
        return bool(self._current())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function of the calling thread returns."""
        return self._current()(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.original,)


def _itself(original: Any) -> Any:
    return original


_changing = ForkSafeLock()


@contextmanager
def overridden(module: nn.Module | ModuleType, name: str, own: Callable[[Any], Any]) -> Iterator[Override]:
    """Let this thread see another attribute while the context lasts.

    Args:
        module: may be called by other threads, too; a Python module whose functions know this one by its name, too.
        name: name of the attribute, which is a flag or a function.
        own: makes what this thread is to see of what the attribute was.

    Raises:
        RuntimeError: this thread does so already.
    """
    override = _put_in(module, name)
    try:
        with override.own(own(override.original)):
            yield override
    finally:
        _take_out(module, name, override)


def _put_in(module: nn.Module | ModuleType, name: str) -> Override:
    with _changing:
        override = vars(module).get(name)
        if not isinstance(override, Override):
            override = Override(getattr(module, name), inherited=name not in vars(module))
            setattr(module, name, override)
        elif override.is_own():
            raise RuntimeError("a pass over a tree was begun inside another one of the same model and thread")
        override.threads += 1
        return override


def _take_out(module: nn.Module | ModuleType, name: str, override: Override) -> None:
    with _changing:
        override.threads -= 1
        if override.threads or vars(module).get(name) is not override:
            return
        if override.inherited:
            delattr(module, name)
        else:
            setattr(module, name, override.original)
