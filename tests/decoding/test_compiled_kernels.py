"""The compiled kernels against their reference implementations: the same numbers bit for bit, whatever the arrays."""

import contextlib
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from memories import rows_of, tails_of
from reference import mixing
from reference.tree import Tree

import lade
from lade import native
from lade.decoding import readout
from lade.decoding.drafting.memory import ContextMemory, MtpWeights
from lade.decoding.kernels import layout, native_tree, tables
from lade.decoding.kernels.layout import BLOCK, END, MTP_WIDTH, TEXT, WIDTH
from lade.decoding.kernels.native_tree import Columns, Frontier, NativeTree, Requests
from lade.decoding.kernels.tables import Tables
from lade.decoding.tree import TokenTree
from lade.engines import drafter
from lade.native.kernel import NativeKernel

compiled = pytest.mark.skipif(native.library() is None, reason="no compiled kernels here")


def clone(argument):
    match argument:
        case Requests():
            parts = {id(part): part for pair in argument.pairs for part in pair}  # requests share tables
            copies = {key: clone(part) for key, part in parts.items()}
            return SimpleNamespace(pairs=[tuple(copies[id(part)] for part in pair) for pair in argument.pairs])
        case NativeTree():
            return Tree(argument)
        case Columns():
            copy = Columns(len(argument.scores))
            copy.numbers[:], copy.scores[:] = argument.numbers, argument.scores
            return copy
        case Tables():
            copy = Tables(argument.young.copy(), argument.old.copy(), argument.weights.copy())
            copy.counts[:] = argument.counts
            return copy
        case np.ndarray():
            return argument.copy()
    return argument


def arrays_of(argument):
    match argument:
        case Requests() | SimpleNamespace():
            parts = enumerate(part for pair in argument.pairs for part in pair)
            return {(at, name): array for at, part in parts for name, array in arrays_of(part).items()}
        case NativeTree():
            return Tree(argument).arrays()
        case Tree():
            return argument.arrays()
        case Columns():
            return {"numbers": argument.numbers, "scores": argument.scores}
        case Tables():
            return {name: getattr(argument, name) for name in Tables.__slots__}
        case np.ndarray():
            return {"array": argument}
    return {}


class Both:
    """Calls a kernel, and its reference on copies of all arguments."""

    calls = 0

    def __init__(self, kernel: NativeKernel) -> None:
        self._kernel, self._reference = kernel, reference.of(kernel.__name__)

    def __call__(self, *args):
        copies = [clone(argument) for argument in args]
        result, name = self._kernel(*args), self._kernel.__name__
        assert self._reference(*copies) == result, name
        for own, other in zip(args, copies, strict=True):
            others = arrays_of(other)
            for field, array in arrays_of(own).items():
                assert array.tobytes() == others[field].tobytes(), (name, field)
        Both.calls += 1
        return result


@contextlib.contextmanager
def both():
    with pytest.MonkeyPatch.context() as patch:
        for module in (native_tree, tables, readout, drafter):
            for name, thing in list(vars(module).items()):
                if isinstance(thing, NativeKernel) and thing.__name__ not in ("_new_tree", "_free_tree"):
                    patch.setattr(module, name, Both(thing))
        yield


def some_rows(rng, count):
    tokens = [rng.permutation(12)[: rng.integers(0, WIDTH + 1)] for _ in range(count)]
    return rows_of([{int(token): int(rng.integers(0, 256)) for token in row} for row in tokens])


def predict(grower, rng):
    """Predictions of an MTP layer after the root and two of its children."""
    count = int(rng.integers(1, 4))
    tokens = np.array([rng.permutation(20)[:MTP_WIDTH] for _ in range(count)], np.int32)
    tokens[:, rng.integers(1, MTP_WIDTH) :] = -1
    following = rng.integers(0, 12, count).tolist()
    places = Frontier([], [0] * count, following, [0, 1, 1][:count], [], 1.0)
    grower.add_predictions(places, tokens, rng.normal(-2, 4, (count, MTP_WIDTH)))


@compiled
@given(st.integers(0, 2**32), st.booleans())
def test_steps_are_the_same(seed, mtp):
    rng = np.random.default_rng(seed)
    memory = ContextMemory(int(rng.choice([4096, 2**16])))
    memory.weights += rng.normal(0, 0.2, memory.weights.shape)
    grower = NativeTree(rng.integers(0, 12, 2).tolist(), int(rng.integers(6, 14)))
    if mtp:
        weights = MtpWeights()
        weights.lines[:] += rng.normal(0, 0.3, weights.lines.shape)
        weights.trust[:] = rng.normal(0, 3)
        grower.use_mtp(weights.lines, weights.trust)
    text = np.tile(rng.integers(0, 12, rng.integers(1, 40)), rng.integers(1, 4)).tolist()
    grower.set_prompt(int(rng.integers(0, len(text) + 1)))
    with both():
        memory.learn(tables.tails_of(np.array(text), 0, len(text)), some_rows(rng, len(text)))
        memory.learn_text(tables.tails_of(np.array(text), 0, len(text) - 1), text[1:])
        for _ in range(3):
            if rng.random() < 0.9:
                grower.read(text)
            grower.drop_predictions()
            if mtp:
                predict(grower, rng)
            stages = [(int(rng.integers(2, 20)), rng.random() * 0.1), (30, 0.01)]
            depth = None if rng.random() < 0.5 else int(rng.integers(0, 9))
            lead = rng.integers(0, 12, rng.integers(0, 3)).tolist()
            count = len(grower.grow(memory.bound, text, stages, depth, lead))
            grower.candidates(memory.bound, rng.integers(0, count, rng.integers(0, 3)).tolist())
            if rng.random() < 0.3:
                dropped = {int(rng.integers(1, 30))}
                for node, parent in enumerate(Tree(grower).parent[:count].tolist()):
                    dropped |= {node} if parent in dropped else set()
                kept = [node for node in range(count) if node not in dropped]
                grower.keep(kept)
                count = len(kept)
            tree = TokenTree(text[-1])
            grower.copy_to(tree, count)
            tree.add_path(rng.integers(0, 12, 3).tolist(), "other")
            grower.extend(tree, count)
            path = sorted({0, *rng.integers(0, len(tree), 2).tolist()})
            chosen = rng.integers(0, 12, len(path)).tolist()
            memory.learn_tree(grower, some_rows(rng, len(tree)), path, chosen)
            grower.contexts(path)
            text = text[: -rng.integers(1, 9)] + chosen if rng.random() < 0.3 else text + chosen


@compiled
def test_candidates_of_one_place_in_their_hash_table_are_told_apart():
    same = [token for token in range(2**15) if (token * 0x9E3779B1 & 0xFFFFFFFF) >> 24 == 7]
    memory, grower, text = ContextMemory(2**16), NativeTree(), [5, 6, 7]
    with both():
        for end in range(1, 4):  # each context has other tokens
            rows = rows_of([{token: 200 - 10 * place for place, token in enumerate(same[6 * end : 6 * end + 6])}])
            memory.learn(tails_of([[*[9] * (3 - end), *text[-end:]]]), rows)
        memory.learn(tails_of([text]), rows_of([dict.fromkeys(same[:6], 100)]))
        assert len(grower.grow(memory.bound, text, [(30, 0.0)], 1)) > 6


tokens = st.lists(st.integers(0, 2**31 - 1), max_size=9)


@compiled
@given(st.lists(tokens, max_size=8), st.lists(tokens, max_size=8), st.integers(0, 2**32))
def test_tables_are_the_same(some, others, seed):
    rng, young, old = np.random.default_rng(seed), *(np.zeros((60, 2 + WIDTH), np.int32) for _ in range(2))
    with both():
        for table, before, texts in ((old, young.copy(), some), (young, old, others)):
            for first, end in ((0, TEXT), (TEXT, END)):
                tables.learn(table, before, tails_of(texts), some_rows(rng, len(texts)), first, end, 0, 0, 59)
        for text in (*some, *others):
            tables.look_up(young, old, tails_of([text])[0], np.zeros((END, WIDTH), np.int32))
        tables.count_missing(young, old)
        tables.rehash(young, np.zeros((90, 2 + WIDTH), np.int32))
        tables.certain(rng.integers(0, 2 * layout.TOKEN, 5))


@compiled
@given(st.integers(1, 3), st.integers(1, 9 * BLOCK), st.sampled_from([0.0, 1.0, 9.0, 300.0]), st.integers(0, 2**32))
def test_entries_are_the_same(rows, vocabulary, spread, seed):
    rng = np.random.default_rng(seed)
    logits = (spread * rng.normal(size=(rows, vocabulary))).astype(np.float32)
    if rng.random() < 0.4:
        odd = rng.choice([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0], (rows, vocabulary))
        logits = np.where(rng.random((rows, vocabulary)) < rng.random(), odd, logits).astype(np.float32)
    with both():
        readout.entries_of(logits)
        readout.entries_of((logits.view(np.uint32) >> 16).astype(np.uint16))  # the bits of bfloat16


@compiled
@given(st.integers(0, 2**32), st.booleans())
def test_requests_are_the_same(seed, trees):
    rng = np.random.default_rng(seed)
    memories = [lade.Memory(int(rng.choice([4096, 2**16]))) for _ in range(2)]
    drafts = drafter.EngineDrafter(12, rng.integers(0, 12, 1).tolist(), trees=trees, price=rng.random() * 0.1)
    names = list(range(int(rng.integers(1, 5))))
    with both():
        for name in names:
            drafts.begin(name, rng.integers(0, 12, rng.integers(1, 30)).tolist(), memories[rng.integers(0, 2)])
        for _ in range(3):
            proposed = drafts.propose(names, rng.integers(0, 30, len(names)).tolist())
            tokens = [draft.ids[: rng.integers(0, 3)] + rng.integers(0, 12, 1).tolist() for draft in proposed]
            rows = [some_rows(rng, len(draft) + 1) for draft in proposed]
            drafts.learn_batch(names, tokens, rows)


@compiled
def test_the_comparison_sees_a_difference(monkeypatch):
    """Else the tests above could not fail."""
    with both(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixing, "_NEGLIGIBLE", -4.0)
        with pytest.raises(AssertionError, match="learn_tree"):
            for seed in range(20):
                test_steps_are_the_same.hypothesis.inner_test(seed, False)
    assert Both.calls > 0


WITHOUT = """
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
import lade
import lade.native
from lade.embedded import model_path, prompts
lade.native.library_name = lambda: "missing"
torch.set_num_threads(1)
for dtype in torch.float32, torch.bfloat16:
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=dtype).eval()
    ids = AutoTokenizer.from_pretrained(model_path())(prompts()[0], return_tensors="pt", return_token_type_ids=False)
    stats = lade.Stats()
    config = lade.LookaheadConfig()
    assert (config.adaptive, config.window, config.ngram, config.guesses) == (False, 0, 5, 3)
    ours = lade.generate(model, **ids, max_new_tokens=40, do_sample=False, stats=stats)
    assert stats.fallback is None and stats.steps < stats.new_tokens - 1 and max(stats.step_tokens) > 4
    assert dtype == torch.bfloat16 or torch.equal(ours, model.generate(**ids, max_new_tokens=40, do_sample=False))
    with lade.Engine(model) as engine:
        assert engine.add(ids["input_ids"], max_new_tokens=9, do_sample=False).result().shape[1] > 9
supported = lade.supports(model)
assert supported.method == "lookahead" and "kernels are missing, so drafts are" in str(supported), str(supported)
assert not supported.mtp and "install a C++17 compiler" in supported.mtp.reason
for fields in {"budget": 8}, {"mtp": True}, {"adaptive": True}:
    with pytest.raises(lade.ConfigError, match=r"install a C\\+\\+17 compiler"):
        lade.LookaheadConfig(**fields)
for refused in lade.Memory, lambda: lade.EngineDrafter(50):
    with pytest.raises(lade.UnsupportedError, match=r"compiled kernels are missing; install a C\\+\\+17 compiler"):
        refused()
"""


def test_without_the_library_drafts_come_from_the_pool_and_what_needs_it_is_refused_with_the_remedy():
    """In a new process, which says once what is missing."""
    folder = Path(lade.__file__).parents[1]
    run = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, cwd=folder)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("the compiled kernels are missing: drafts are") == 1, run.stderr
