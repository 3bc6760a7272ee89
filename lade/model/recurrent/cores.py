"""Which functions of transformers' mixers are replaced in a pass over a tree, and by what.

Mixers call them by the names that their module knows them by, so what those names mean is changed for the thread that
runs the pass, and for its length: prefill, plain decoding and other threads call the original functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from lade.errors import UnsupportedModelError
from lade.model.facts import ModelFacts
from lade.model.recurrent.convolution import convolution
from lade.model.recurrent.delta_rule import delta_rule
from lade.model.recurrent.selective_scan import selective_scan
from lade.model.recurrent.state_space import mamba2
from lade.model.recurrent.tree_pass import Ancestry
from lade.model.thread_override import Override, overridden

CORES: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": selective_scan,
}
"""By the name of the function for several tokens (`facts.RECURRENT_FUNCTIONS`); called with the pass, that function,
and its arguments."""


def is_recurrent(model: nn.Module) -> bool:
    """Whether a model has recurrent layers whose functions are known."""
    return ModelFacts.of(model).recurrent


class CorePatches:
    """Replaces the functions that the recurrent layers of one model call; most models have none."""

    def __init__(self, facts: ModelFacts) -> None:
        self._found = facts.recurrent_functions

    def __bool__(self) -> bool:
        """Whether the model has such functions, and so recurrent layers."""
        return bool(self._found)

    @property
    def forgets(self) -> bool:
        """Whether what feeds several tokens begins with an empty state, and does not say so."""
        return any(name == "mamba_selective_scan" for _, name in self._found)

    @contextmanager
    def patched_for(self, tree_pass: Ancestry) -> Iterator[None]:
        """While the context lasts, the cores compute what this thread feeds to recurrent layers.

        Raises:
            UnsupportedModelError: one of the functions was not called, or not by this thread.
        """
        with ExitStack() as stack:
            overrides = [
                (name, stack.enter_context(_replaced(module, name, tree_pass))) for module, name in self._found
            ]
            yield
            called = {name for name, override in overrides if override.used}
            if any(name not in called for name, _ in overrides):  # a part may come from the module of another family
                raise UnsupportedModelError(
                    "its recurrent layers do not call the functions that know of a tree",
                    "load the model without kernels from elsewhere, or use plain model.generate",
                )


def _replaced(module: ModuleType, name: str, tree_pass: Ancestry) -> AbstractContextManager[Override]:
    return overridden(module, name, lambda original: partial(CORES[name], tree_pass, original))
