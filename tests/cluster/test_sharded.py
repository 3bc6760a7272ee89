"""Models in wrappers that keep several processes in step: what is served, and what is left to plain decoding."""

import os
import warnings

import pytest
import torch
from processes import in_processes
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lade
from lade.backends.cpu.kernels import kernel
from lade.testing import toy_model

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5]])
CPU = torch.device("cpu")


def model():
    return toy_model(dtype=torch.float32)


def sharded(model):
    """By FSDP2, each layer by itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def own_call(rank):
    """Each process has a text of its own, which takes another number of passes."""
    return {"inputs": IDS[:, : 13 - 4 * rank], "max_new_tokens": 12 + 6 * rank, "do_sample": False}


def of_sharded(rank):
    warnings.simplefilter("ignore")
    call, shards, stats = own_call(rank), sharded(model()), lade.Stats()
    expected = model().generate(**call)
    found = [
        lade.generate(shards, stats=stats, **call),
        shards.generate(custom_generate=lade.decode, **call),
        lade.enable(shards).generate(**call),
    ]
    try:
        lade.generate(shards, lookahead=lade.LookaheadConfig(), **call)
    except lade.UnsupportedModelError as problem:
        return [stats.fallback in str(problem), *(torch.equal(each, expected) for each in found)]


def test_processes_that_share_weights_go_on_making_as_many_passes():
    """Trees would have them make different numbers of them, and wait for one another for ever."""
    assert in_processes(2, of_sharded, seconds=100) == [[True] * 4] * 2


def says(door):
    """What a door refuses a model with; nothing if it does not."""
    try:
        door()
    except lade.UnsupportedModelError as problem:
        return str(problem)
    return ""


def of_one_process(rank):
    warnings.simplefilter("ignore")
    call, stats = own_call(rank), lade.Stats()
    expected = model().generate(**call)
    shards, wrapped = sharded(model()), DistributedDataParallel(model())
    whole, of_whole = FullyShardedDataParallel(model(), device_id=CPU, use_orig_params=True), lade.Stats()
    return {
        "sharded": torch.equal(lade.generate(shards, stats=stats, **call), expected) and stats.fallback is None,
        "inside": torch.equal(lade.generate(wrapped.module, **call), expected),
        "enabled": torch.equal(lade.enable(wrapped.module).generate(**call), expected),
        "whole": torch.equal(lade.generate(whole, stats=of_whole, **call), expected),
        "told": "its .module" in str(of_whole.fallback),
        "packed": "load it whole" in says(lambda: lade.pack(shards, min_weights=1)),
        "invariant": "load it whole" in says(lambda: lade.invariant(shards)),
        "sharded since": not kernel("attend").available  # then nothing can be made invariant
        or "sharded after it was made" in lade.supports(sharded(lade.invariant(model()))).reason,
    }


@pytest.mark.by_processor
def test_wrappers_in_one_process():
    (found,) = in_processes(1, of_one_process)
    assert all(found.values()), found
