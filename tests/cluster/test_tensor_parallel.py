"""Models whose layers are split over processes: every process returns what one process writes alone."""

import os
import time

import pytest
import torch
from processes import in_processes
from split_toys import saved, split, whole
from torch import distributed as dist
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

import lade
from lade import LookaheadConfig, Memory, Stats
from lade.backends.cuda_graphs.backend import capture_refusal
from lade.backends.processes import leader as leading
from lade.model.facts import CACHE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
IDS = torch.arange(3, 15)[None]
TWO = torch.cat([IDS, IDS.flip(1)])
PAPER, SMALL = LookaheadConfig(4, 3, 4), LookaheadConfig(budget=12)
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20}
CASES = {
    "greedy": (IDS, {}, "auto"),
    "sampled": (IDS, SAMPLED, "auto"),
    "paper": (IDS, {}, PAPER),
    "penalty": (IDS, {"repetition_penalty": 1.2}, SMALL),
    "batch": (TWO, SAMPLED, "auto"),
    "batch that ends": (TWO, {"eos_token_id": 7, "pad_token_id": 0}, SMALL),
    "beams": (IDS, {"num_beams": 3}, PAPER),
    "scores": (TWO, {"return_dict_in_generate": True, "output_scores": True}, SMALL),
    "chunks": (IDS, {"prefill_chunk_size": 5}, "auto"),
    "plain": (IDS, SAMPLED, None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def llama(folder):
    return saved("llama", folder)


def both(result):
    """Ids, and what torch's generator draws next."""
    return [getattr(result, "sequences", result).tolist(), torch.rand(3).tolist()]


def written(place, model, cases, rank, max_new_tokens=24):
    """Whether a process gets what the whole model alone writes, by case."""
    reference, found = whole(place), {}
    for name, (ids, given, lookahead) in cases.items():
        arguments = {"max_new_tokens": max_new_tokens, "do_sample": False, **given}
        torch.manual_seed(7)
        expected = both(reference.generate(ids, **arguments))
        torch.manual_seed(7 + 100 * rank)  # that of the first process counts
        found[name] = both(lade.generate(model, ids, lookahead=lookahead, **arguments)) == expected
    return found


def check(place, size, cases):
    asked = {name: CASES[name] for name in cases}
    expected = dict.fromkeys(cases, True)
    assert in_processes(size, lambda rank: written(place, split(place, size), asked, rank)) == [expected] * size


def test_two_processes_write_what_one_does(llama):
    check(llama, 2, ["greedy", "sampled", "batch"])


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss"])
def test_families(kind, folder):
    experts = {"dtype": torch.float32} if kind in ("qwen3_moe", "gpt_oss") else {}  # their products refuse float64
    check(saved(kind, folder, **experts), 2, list(CASES))


@pytest.mark.distributed
def test_four_processes(folder):
    check(saved("mistral", folder, num_key_value_heads=4), 4, list(CASES))


@pytest.mark.distributed
@pytest.mark.measured_cost
def test_passes_are_measured_together(llama):
    check(llama, 2, ["greedy", "batch"])


class Failing(LogitsProcessor):
    """Raises when it has been called five times."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls > 5:
            raise KeyError("a user's processor")
        return scores


class Counting(StoppingCriteria):
    """Counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.zeros(len(input_ids), dtype=torch.bool)


def raised(call):
    try:
        call()
    except Exception as problem:
        return [type(problem).__name__, str(problem)]
    return None


def users_things(place, rank):
    """A processor that fails, then a call that does not; things of the user's are called in the first process alone."""
    reference, model, memory = whole(place), split(place, 2), Memory()
    fails = LogitsProcessorList([Failing()])
    start = time.perf_counter()
    failed = raised(lambda: lade.generate(model, IDS, max_new_tokens=20, do_sample=False, logits_processor=fails))
    seconds = time.perf_counter() - start
    wrong = raised(lambda: lade.generate(model, IDS + 1000, max_new_tokens=20))
    counting, stats = Counting(), Stats()
    config = LookaheadConfig(budget=8, memory=memory) if rank == 0 else "auto"
    criteria = StoppingCriteriaList([counting])
    arguments = {"max_new_tokens": 20, "do_sample": False, "stopping_criteria": criteria}
    ids = lade.generate(model, IDS, lookahead=config, stats=stats, **arguments)
    good = ids.tolist() == reference.generate(IDS, max_new_tokens=20, do_sample=False).tolist()
    return [failed, seconds < 20, wrong, good, counting.calls, stats.new_tokens]


@pytest.mark.distributed
def test_an_error_of_the_first_process_reaches_the_others_and_the_next_call_works(llama):
    first, second = in_processes(2, lambda rank: users_things(llama, rank))
    assert first[0] == second[0] == ["KeyError", '"a user\'s processor"']
    assert first[2] == second[2] and first[2][0] == "InputError"
    assert first[1] and second[1] and first[3] and second[3]
    assert (first[4:], second[4:]) == ([20, 20], [0, 0])


def streamed(place, rank):
    model, found = split(place, 2), []
    whole_text = [token for step in lade.stream(model, IDS, max_new_tokens=20) for token in step.tokens]
    for step in lade.stream(model, IDS, max_new_tokens=20, lookahead=SMALL):
        found += step.tokens
        if len(found) > 5 or rank:  # the second process stops reading at once
            break
    again = lade.generate(model, IDS, max_new_tokens=20).tolist()[0][IDS.shape[1] :]
    return [whole_text, found, again]


@pytest.mark.distributed
def test_streams_have_their_steps_in_all_processes_and_may_be_left(llama):
    first, second = in_processes(2, lambda rank: streamed(llama, rank))
    assert first[0] == second[0] == first[2] == second[2]
    assert first[1] == first[0][: len(first[1])] and 5 < len(first[1]) < 20
    assert second[1] == first[0][: len(second[1])]


def short(model):
    return lade.generate(model, IDS, max_new_tokens=8).tolist()


REQUESTS = [
    (row[:length], arguments)
    for row in TWO
    for length in (12, 7)
    for arguments in ({"do_sample": True}, {"do_sample": False}, {"repetition_penalty": 1.2})
]


def served(model, rank):
    """Texts of an engine's requests, then of these texts' own, and of one that comes late; what else is refused."""
    if rank:
        return [lade.follow(model), raised(lambda: lade.Engine(model)), short(model)]
    with lade.Engine(model, prefix_cache=2**20, max_rows=3) as engine:
        handles = [engine.add(row, seed=3, max_new_tokens=30, **arguments) for row, arguments in REQUESTS]
        found = [handle.result()[0].tolist() for handle in handles]
        busy = raised(lambda: short(model))
        longer = [engine.add(torch.tensor(text), max_new_tokens=20) for text in found]
        found += [handle.result()[0].tolist() for handle in longer]
        time.sleep(1.0)
        found.append(engine.add(TWO[0], max_new_tokens=12).result()[0].tolist())
        engine.add(TWO[0], max_new_tokens=400).cancel()
    return [found, min(handle.cached_tokens for handle in longer), busy, short(model)]


def check_engine(place, size, make):
    """Assert that an engine of the first process is followed to its end, and that its texts are plain decoding's."""
    reference, expected = whole(place), []
    for row, arguments in REQUESTS:
        torch.manual_seed(3)
        expected.append(reference.generate(row[None], max_new_tokens=30, **arguments)[0].tolist())
    expected += [reference.generate(torch.tensor([text]), max_new_tokens=20)[0].tolist() for text in expected]
    expected.append(reference.generate(TWO[:1], max_new_tokens=12)[0].tolist())
    (found, cached, busy, last), *others = in_processes(size, lambda rank: served(make(place), rank))
    assert found == expected
    assert cached > 30, "some process lacks the last tokens of some of these texts"
    assert busy[0] == "ClusterError" and "an open lade.Engine" in busy[1]
    for followed, (name, words), other_last in others:
        assert followed is None and name == "UnsupportedModelError" and "lade.follow" in words
        assert other_last == last


@pytest.mark.distributed
def test_an_engine_of_the_first_process_is_followed_to_its_end(llama):
    check_engine(llama, 2, lambda place: split(place, 2))


def other_tree(place, rank):
    model = split(place, 2)
    if rank == 0:
        leading.flattened = lambda tree: ([*tree.ids[:-1], (tree.ids[-1] + 1) % 60], tree.parents)
    return raised(lambda: lade.generate(model, IDS, max_new_tokens=30, lookahead=SMALL))


@pytest.mark.distributed
def test_a_tree_that_is_not_the_first_process_s_is_found_out(llama):
    first, second = in_processes(2, lambda rank: other_tree(llama, rank))
    assert second[0] == "ClusterError" and "differs from that of process 0" in second[1]
    assert first[0] == "ClusterError"


@pytest.mark.distributed
def test_a_process_that_comes_late_is_waited_for(llama):
    def late(rank):
        model = split(llama, 2)
        time.sleep(10 * rank)
        return lade.generate(model, IDS, max_new_tokens=5).tolist()

    first, second = in_processes(2, late)
    assert first == second and len(first[0]) == IDS.shape[1] + 5


def refusals(place, size):
    model = split(place, size)
    train = raised(lambda: lade.generate(model.train(), IDS, max_new_tokens=3, lookahead=SMALL))
    model.eval()
    cache = raised(lambda: lade.generate(model, IDS, max_new_tokens=3, past_key_values=lade.TreeCache()))
    door = raised(lambda: model.generate(IDS, max_new_tokens=3, custom_generate=lade.decode, lookahead=SMALL))
    steps = raised(lambda: lade.stream(model, IDS, max_new_tokens=3, lookahead=None) if dist.get_rank() == 0 else 1)
    if dist.get_rank():
        raised(lambda: lade.follow(model))
    return [train, cache, door, steps, capture_refusal(model)]


@pytest.mark.distributed
def test_what_cannot_be_served_is_refused(llama, folder):
    first, second = in_processes(2, lambda rank: refusals(llama, 2))
    assert first[:3] == second[:3] and "split over processes" in first[4]
    said = ["training mode", CACHE, "lade.decode", "lade.stream"]
    for (name, words), expected in zip(first[:4], said, strict=True):
        assert name.startswith("Unsupported") and expected in words
    answers = in_processes(4, lambda rank: lade.supports(split(llama, 4)).reason)
    no_plan = in_processes(2, lambda rank: raised(lambda: split(saved("gpt2", folder), 2)))
    assert no_plan[0][0] == "ValueError" and "plan" in no_plan[0][1]
    assert answers == [answers[0]] * 4 and "2 KV heads cannot be divided evenly" in answers[0]
