"""Hooks that act for one thread: others may call the same model meanwhile.

A module runs its hooks whichever thread calls it. These do nothing but for the thread that registered them, and
nothing at all once they are removed, not even in a copy of the module that was made while they were there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

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
