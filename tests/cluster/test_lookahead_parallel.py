"""Lookahead parallelism: each process has the whole model and feeds a part of the tree."""

import os
import socket
import subprocess
import sys

import pytest
import torch
from processes import in_processes
from split_toys import saved, whole
from test_tensor_parallel import IDS, PAPER, SAMPLED, SMALL, TWO, both, check_engine, raised, written
from torch import distributed as dist
from transformers import MambaConfig, MambaForCausalLM

import lade
from lade import LookaheadConfig, Memory, Stats
from lade.backends.processes import leader as leading
from lade.decoding.drafting.controller import LARGEST, max_tree_size
from lade.decoding.drafting.step_cost import StepCost
from lade.hf import job
from lade.model.runner import EagerRunner

MAMBA = MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
CASES = {
    "greedy": (IDS, {}, "auto"),
    "sampled": (IDS, SAMPLED, LookaheadConfig(budget=24)),
    "paper": (IDS, {}, LookaheadConfig(7, 5, 7)),
    "penalty": (IDS, {"repetition_penalty": 1.2}, SMALL),
    "batch": (TWO, SAMPLED, "auto"),
    "batch that ends": (TWO, {"eos_token_id": 7, "pad_token_id": 0}, LookaheadConfig(budget=24)),
    "padded": (TWO, {"attention_mask": torch.tensor([[0] * 4 + [1] * 8, [1] * 12])}, SMALL),
    "scores": (IDS, {"return_dict_in_generate": True, "output_scores": True}, SMALL),
    "large": (IDS, {}, LookaheadConfig(budget=128)),
    "beams": (IDS, {"num_beams": 3}, None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def agree(place, cases, rank):
    """Whether a process gets what it should, by case."""
    model = lade.parallel(whole(place))
    return written(place, model, {name: CASES[name] for name in cases}, rank, max_new_tokens=40)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3_text", "mistral-window"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_process_returns_what_one_writes_alone(kind, size, folder):
    place = saved(kind, folder)
    expected = dict.fromkeys(CASES, True)
    assert in_processes(size, lambda rank: agree(place, CASES, rank)) == [expected] * size


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["llama", "mistral-window"])
def test_eight_processes(kind, folder):
    place, expected = saved(kind, folder), dict.fromkeys(CASES, True)
    assert in_processes(8, lambda rank: agree(place, CASES, rank), seconds=500) == [expected] * 8


class Free(StepCost):
    """More tokens cost next to nothing, whatever passes really take."""

    def observe(self, size, seconds, *, prepared=False):
        pass


def in_large_trees(place, rank):
    """Whether texts are those of plain decoding, the sizes of trees, and the largest part of one that is no chain.

    A chain cannot be split: each node needs all those before it. Only the process that drafts knows the trees.
    """
    job.step_cost_for = lambda model, runner, batch=1: Free.of({1: [1.0], 256: [1.001]})
    reference, model, memory, trees, fed, right = whole(place), lade.parallel(whole(place)), Memory(), [], [0], []
    flat, forward = leading.flattened, EagerRunner.forward

    def sent(tree):
        trees.append((len(tree), max(tree.depths)))
        return flat(tree)

    def noted(runner, parts, *rest):
        if len(parts) == 1 and (not trees or trees[-1][1] < trees[-1][0] / 4):
            fed.append(len(parts[0]))
        return forward(runner, parts, *rest)

    leading.flattened, EagerRunner.forward = sent, noted
    for seed in range(2):
        for ids, arguments in ((IDS, SAMPLED), (IDS, {"do_sample": False}), (TWO, SAMPLED)):
            torch.manual_seed(seed)
            expected = both(reference.generate(ids, max_new_tokens=100, **arguments))
            torch.manual_seed(seed)
            config = LookaheadConfig(memory=memory)
            right.append(both(lade.generate(model, ids, max_new_tokens=100, lookahead=config, **arguments)) == expected)
    return [all(right), max([size for size, _ in trees], default=0), max(fed)]


@pytest.mark.distributed
@pytest.mark.parametrize("size", [1, 2, 4])
def test_adaptive_trees_are_as_large_as_all_processes_feed(size, folder):
    place = saved("llama", folder)
    answers = in_processes(size, lambda rank: in_large_trees(place, rank))
    assert all(right for right, _, _ in answers)
    _, largest, most = answers[0]
    if size == 1:
        assert largest == LARGEST >= most
    else:
        assert LARGEST < largest <= max_tree_size(size) and 0 < most < 0.8 * largest


@pytest.mark.measured_cost
@pytest.mark.distributed
def test_passes_are_measured_together(folder):
    place, cases = saved("llama", folder), ["greedy", "batch"]
    assert in_processes(2, lambda rank: agree(place, cases, rank)) == [dict.fromkeys(cases, True)] * 2


def brought(place, rank):
    """Bytes that this process sends after its passes, and the nodes that it has fed, by way of choosing."""
    model, gather, found, sent = lade.parallel(whole(place)), dist.gather, [], []

    def noted(tensor, *rest, **more):
        sent.append(tensor.numel() * tensor.element_size())
        return gather(tensor, *rest, **more)

    dist.gather = noted
    for arguments in ({"do_sample": False}, SAMPLED):
        for config in (LookaheadConfig(budget=24), PAPER):
            sent.clear()
            lade.generate(model, IDS, max_new_tokens=40, lookahead=config, **arguments)
            found.append([len(sent), max(sent)])
    return found


@pytest.mark.distributed
def test_greedy_decoding_brings_no_rows_of_logits(folder):
    first, second = in_processes(2, lambda rank: brought(saved("llama", folder), rank))
    assert first == second and all(times > 5 for times, _ in first)
    adaptive, paper, *sampled = [most for _, most in first]
    row = 8 * whole(saved("llama", folder)).config.vocab_size
    assert adaptive <= 24 * 28 and paper <= 40 * 4 and all(most >= 4 * row for most in sampled)


@pytest.mark.distributed
@pytest.mark.parametrize("size", [2, 3])
def test_an_engine_s_requests_get_their_own_tokens(size, folder):
    check_engine(saved("llama", folder), size, lambda place: lade.parallel(whole(place)))


def steps(place, rank, size):
    """How many steps a text takes, and the mean size of the passes of this process; a long path cannot be cut."""
    model, stats = whole(place), Stats()
    if size > 1:
        lade.parallel(model)
    memory = Memory()
    config = LookaheadConfig(budget=32, memory=memory)
    fed = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for _ in range(2):  # the second time it is in memory, which only the first process has
        lade.generate(model, IDS, max_new_tokens=60, lookahead=config, stats=stats)
    return [stats.steps, sum(fed) / len(fed)]


@pytest.mark.distributed
def test_steps_are_as_many_as_alone_and_passes_smaller(folder):
    place = saved("llama", folder)
    (alone, mean), *_ = in_processes(1, lambda rank: steps(place, rank, 1))
    shared = in_processes(4, lambda rank: steps(place, rank, 4))
    assert shared[0][0] == alone < 100
    assert max(each for _, each in shared) < 0.7 * mean


@pytest.mark.distributed
def test_what_is_not_served_is_refused(folder):
    def refusals(rank):
        model = lade.parallel(whole(saved("llama", folder)))
        beams = raised(lambda: lade.generate(model, IDS, num_beams=2, max_new_tokens=4, lookahead=PAPER))
        recurrent = raised(lambda: lade.parallel(MambaForCausalLM(MAMBA).eval()))
        return [beams, recurrent]

    saved("llama", folder)
    first, second = in_processes(2, refusals)
    assert first == second
    for (name, text), words in zip(first, ["num_beams", "recurrent"], strict=True):
        assert name.startswith("Unsupported") and words in text


SCRIPT = """
import atexit
atexit.register(lambda: print("connected" if dist.is_initialized() else "closed"))  # before all imports: runs last
import lade, torch
from torch import distributed as dist
from lade.testing import toy_model
model = lade.parallel(toy_model())
if dist.get_rank():
    print(lade.follow(model))
else:
    engine = lade.Engine(model)
    print(engine.add(torch.ones(4, dtype=torch.long), max_new_tokens=3).result().shape)
"""


@pytest.mark.distributed
def test_a_script_that_ends_ends_its_engine_and_then_the_connections_that_it_has_opened():
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=os.environ | place | at)
        for at in ({"RANK": "0"}, {"RANK": "1"})
    ]
    said = [(process.communicate(timeout=240)[0].split("\n")[-3:-1], process.returncode) for process in both]
    assert said == [(["torch.Size([1, 7])", "closed"], 0), (["None", "closed"], 0)]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
