"""Models and what belongs to them on their way to other processes."""

import copy
import os
import pickle
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from pretend import torch_threads
from torch import multiprocessing

import lade
from lade.testing import toy_model

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 3, 1, 4, 1, 5]])
NEW = {"max_new_tokens": 20, "do_sample": False}


def packed(family="llama", **options):
    return lade.pack(toy_model(family, dtype=torch.float32), min_weights=1, **options)


MODELS = {
    "as it is": lambda: toy_model(dtype=torch.float32),
    "enabled": lambda: lade.enable(toy_model(dtype=torch.float32)),
    "packed": packed,
    "packed, with a tied head": lambda: packed("gpt2"),
    "packed beside its weights": lambda: packed("gpt2", keep_original=True),
    "in int8": lambda: packed(weights="int8"),
    "invariant": lambda: lade.invariant(toy_model(dtype=torch.float32)),
    "invariant in int8": lambda: lade.invariant(packed(weights="int8")),
}


def decoded(model, found):
    """In a process that was started: a model's text, by plain decoding and by ours."""
    torch.set_num_threads(1)
    stats, plain = lade.Stats(), model.generate(IDS, **NEW).tolist()
    ours = lade.generate(model, input_ids=IDS, stats=stats, **NEW).tolist()
    found.put((plain, ours, stats.fallback))


@pytest.fixture
def one_thread():
    """For which invariant models are tried then, and processes are started with."""
    with torch_threads(1):
        yield


@pytest.mark.slow
@pytest.mark.by_processor
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:.*running at normal speed:lade.FallbackWarning")
@pytest.mark.parametrize("name", MODELS)
def test_a_started_process_decodes_with_the_model_it_was_given(name):
    model, spawning = MODELS[name](), multiprocessing.get_context("spawn")
    expected, support = model.generate(IDS, **NEW).tolist(), lade.supports(model)
    found = spawning.Queue()
    process = spawning.Process(target=decoded, args=(model, found))
    process.start()
    assert found.get(timeout=120) == (expected, expected, None if support else str(support))
    process.join()
    assert model.generate(IDS, **NEW).tolist() == expected, "it was left as it was"


class Started:
    """A process that is being started: it is handed files, which are open until it is there."""

    DupFd = int

    def __init__(self):
        self.files = []

    def duplicate_for_child(self, file):
        self.files.append(file)
        return file


@pytest.mark.skipif(multiprocessing.get_sharing_strategy() != "file_descriptor", reason="memory is not shared by files")
@pytest.mark.parametrize("name", [name for name in MODELS if "packed" in name or name == "in int8"])
def test_what_is_made_to_send_a_packed_model_is_not_sent_as_shared_memory(name):
    """It is gone before the process is there; its file is another one's then, or none."""
    model, started = MODELS[name](), Started()
    expected = model.generate(IDS, **NEW)
    context.set_spawning_popen(started)
    try:
        ForkingPickler.dumps(model)
    finally:
        context.set_spawning_popen(None)
    assert started.files and len(set(started.files)) == len(started.files)
    for file in started.files:
        os.fstat(file)
    assert torch.equal(model.generate(IDS, **NEW), expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_memory_is_copied_with_all_it_knows(copied):
    model, memory = toy_model(), lade.Memory(2**20)
    memory.fingerprint = "a tokenizer's"
    config = lade.LookaheadConfig(memory=memory)
    expected = lade.generate(model, input_ids=IDS, lookahead=config, **NEW)
    other = copied(config).memory
    assert len(other) == len(memory) > 0 and vars(other).keys() == vars(memory).keys()
    assert (other.max_bytes, other.fingerprint) == (memory.max_bytes, memory.fingerprint)
    assert all(np.array_equal(*pair) for pair in zip(memory.tables, other.tables, strict=True))
    text = expected[0].tolist()
    assert all(map(np.array_equal, memory.lookup(text[:20]), other.lookup(text[:20])))
    known = len(memory)
    lade.generate(model, input_ids=IDS + 1, lookahead=lade.LookaheadConfig(memory=other), **NEW)
    assert len(other) > known == len(memory), "it is another one"


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_an_engine_and_its_handles_stay_where_they_are(copied):
    with lade.Engine(toy_model()) as engine:
        handle = engine.add([1, 2, 3], max_new_tokens=2)
        for thing, name in ((engine, "Engine"), (handle, "Handle")):
            with pytest.raises(TypeError, match=f"an? {name} .* process .* cannot be copied or pickled"):
                copied(thing)
        assert handle.result(60).shape == (1, 5)
