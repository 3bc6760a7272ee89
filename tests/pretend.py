"""What tests pretend of the machine, of what is installed, and of sizes that would take long to reach."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import dynamic_module_utils

from lade.backends.cpu.invariant import make_invariant, trials
from lade.backends.cuda_graphs import pool as model_pools
from lade.backends.cuda_graphs import static_cache
from lade.decoding.drafting.step_cost import StepCost
from lade.hf import job, processors
from lade.model import prefill
from lade_lab.fakes import nearly_flat_cost

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])]


@contextmanager
def torch_threads(number: int | None = None) -> Iterator[int]:
    """Have torch use so many threads within this context, or leave that to it; yields how many there were."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def use_threads(patch: pytest.MonkeyPatch, number: int) -> None:
    """Have kernels shared among so many threads."""
    patch.setattr(torch, "get_num_threads", lambda: number)


def typed(patch: pytest.MonkeyPatch, *words: str) -> None:
    """Have the process started with these words, the first of which is the program."""
    patch.setattr(sys, "argv", list(words))


def cost_of_passes(patch: pytest.MonkeyPatch, cost_of: Callable[[int], StepCost] | None = None) -> None:
    """Have the cost of passes over so many rows known, and not measured: by default nearly the same for each size."""
    made = cost_of or (lambda batch: nearly_flat_cost())
    patch.setattr(job, "step_cost_for", lambda model, runner, batch=1: made(batch))


def chosen_at_once(patch: pytest.MonkeyPatch, at_once: bool) -> None:
    """Whether the nodes of a tree are chosen at once, as on a device that is waited for."""
    patch.setattr(processors, "prefers_batched", lambda device: at_once)


def pool_for(patch: pytest.MonkeyPatch, model: Any, pool: Any) -> None:
    """Give a model the buffers that it would have on a CUDA device."""
    patch.setitem(model_pools._pools, model, pool)


def own_kernel_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have Triton compile anew, into this folder."""
    import triton

    patch.setattr(triton.knobs.cache, "dir", str(folder))


def without(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Have imports of these modules fail, as where their packages are not installed."""
    for name in names:
        patch.setitem(sys.modules, name, None)


def not_found(patch: pytest.MonkeyPatch, module: Any, *names: str) -> None:
    """Have a module that asks with `find_spec` not find packages: those that begin with `names`, or all."""
    found = module.find_spec
    patch.setattr(module, "find_spec", lambda name: None if name.startswith(names or ("",)) else found(name))


def no_warm_up(patch: pytest.MonkeyPatch) -> None:
    """Have servers compile and measure nothing before they are ready."""
    patch.setattr("lade.server.service.warm_up", lambda engine, model, settings: None)


def own_modules(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have transformers copy the code of checkpoints to a folder, and forget afterwards that it is there."""
    patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
    patch.setattr(sys, "path", list(sys.path))


def short_trials(patch: pytest.MonkeyPatch) -> None:
    """Try a model before it is made invariant on one text, behind which the tree crosses the border of a tile."""
    patch.setattr(make_invariant, "TEXTS", (61,))
    patch.setattr(trials, "TEXTS", (60,))


def short_pieces(patch: pytest.MonkeyPatch, tokens: int | None = None, logits: int | None = None) -> None:
    """Keep so few last tokens of a prompt, and show so few logits at once."""
    for name, size in (("MOST_TOKENS", tokens), ("PIECE_LOGITS", logits)):
        patch.setattr(prefill, name, size or getattr(prefill, name))


def small_buffers(patch: pytest.MonkeyPatch) -> None:
    """Have the first buffers of captured passes hold 256 slots."""
    patch.setattr(static_cache, "AHEAD_TOKENS", 8)
    patch.setattr(static_cache, "LARGEST_STEP", 32)
