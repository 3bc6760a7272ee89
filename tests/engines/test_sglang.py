"""Drafts inside SGLang, without it: its NGRAM worker has a stand-in, a model's logits are the passes."""

import importlib
import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sglang_worker as stand_in
from replay import logits, plainly, toy, tree_of
from spies import watched

import lade

COUNT, NODES = 60, 9
FOLDER = Path(__file__).parents[2] / "examples" / "sglang_plugin"


def asked():
    """Prompts by the names of their requests."""
    return {f"r{number}": prompt for number, prompt in enumerate(toy()[1])}


@cache
def plain(name):
    return plainly(asked()[name], COUNT)


@pytest.fixture(scope="module")
def plugin():
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_in.modules("0.5.23").items():
            patch.setitem(sys.modules, name, module)
        patch.syspath_prepend(FOLDER)
        patch.delitem(sys.modules, "lade_sglang", raising=False)
        yield importlib.import_module("lade_sglang")
        sys.modules.pop("lade_sglang", None)


def worker(plugin, *, breadth=10, memory=None, nodes=NODES):
    plugin.register("lade", memory=memory)
    args = stand_in.arguments(speculative_num_draft_tokens=nodes, speculative_ngram_max_bfs_breadth=breadth)
    algorithm = stand_in.REGISTRY["LADE"]
    algorithm.validate_server_args(args)
    algorithm.handle_server_args(args)
    target = stand_in.TargetWorker(logits, toy()[0].config.vocab_size)
    return algorithm.create_worker(args)(args, 0, 0, target)


@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("breadth", [1, 10], ids=["chains", "trees"])
@pytest.mark.parametrize("is_late", [False, True], ids=["results at once", "results late"])
def test_the_tokens_are_those_of_plain_decoding(plugin, monkeypatch, breadth, most, is_late):
    one = worker(plugin, breadth=breadth)
    begun = watched(monkeypatch, one.ngram_corpus.drafter, "begin", lambda name, text: name)
    texts, passes = stand_in.serve(one, asked(), COUNT, most=most, is_late=is_late)
    assert texts == {name: plain(name) for name in texts}
    assert sorted(begun) == sorted(texts)  # each once: the drafter knows all tokens of a text
    if most == 1:
        assert len(texts) * COUNT / passes > 2.0
    assert set(one.ngram_corpus.drafter.requests) <= one._prev_decode_rids


def test_trees_and_masks_are_those_of_the_project(plugin):
    one = worker(plugin)
    stand_in.serve(one, asked(), COUNT)
    corpus, prompt = one.ngram_corpus, asked()["r0"]
    ids, masks = corpus.batch_get(["again", "short"], [prompt[-18:], [7]], [len(prompt), 1])
    (draft, other) = corpus.drafter.propose(["again", "short"], NODES - 1)
    assert ids.dtype == masks.dtype == np.int64
    ids, masks = ids.reshape(2, NODES), masks.reshape(2, NODES, NODES)
    assert len(set(draft.parents)) < len(draft) == NODES - 1  # it branches
    tree = tree_of(prompt, draft)
    assert ids[0].tolist() == tree.ids
    np.testing.assert_array_equal(masks[0], np.asarray(tree.closure()))
    assert stand_in.links(masks[0]).tolist() == [-1, *(parent + 1 for parent in draft.parents)]
    np.testing.assert_array_equal(masks[1, : 1 + len(other), : 1 + len(other)], other.mask())


def test_a_breadth_of_one_gives_chains_and_a_short_tree_is_padded_as_sglang_pads_its_own(plugin):
    one = worker(plugin, breadth=1)
    stand_in.serve(one, asked(), 30)
    prompt = asked()["r0"]
    _, mask = one.ngram_corpus.batch_get(["again"], [prompt[-18:]], [len(prompt)])
    np.testing.assert_array_equal(mask.reshape(NODES, NODES), np.tri(NODES, dtype=np.int64))
    corpus = plugin.Corpus(100, [], 5)
    ids, masks = corpus.batch_get(["a"], [[3]], [1])
    assert ids.tolist() == [3, 0, 0, 0, 0]
    expected = np.eye(5, dtype=np.int64)
    expected[:, 0] = 1
    np.testing.assert_array_equal(masks.reshape(5, 5), expected)
    assert plugin.Corpus(100, [], 1).batch_get(["a"], [[3]], [1])[1].tolist() == [1]


def test_a_text_that_goes_on_in_another_way_begins_anew(plugin):
    """As after SGLang has retracted a request, and prefills it again."""
    corpus = plugin.Corpus(100, [], 5)
    req = stand_in.Req("a", list(range(30)))
    corpus.expect([req])
    corpus.batch_get(["a"], [[*range(13, 30), 7]], [31])
    assert corpus.drafter.text("a") == [*range(30), 7]
    req.output_ids += [8, 9]
    corpus.batch_get(["a"], [[*range(14, 30), 8, 9]], [32])
    assert corpus.drafter.text("a") == [*range(30), 8, 9]
    corpus.batch_get(["b"], [[4, 5, 6]], [90])  # a text that is not at hand
    assert corpus.drafter.text("b") == [4, 5, 6]
    corpus.erase_match_state(["a", "c"])
    assert corpus.drafter.requests == ["b"]
    corpus.reset()
    assert corpus.drafter.requests == [] and len(corpus.drafter.memory) == 0


def test_a_memory_that_was_saved_is_loaded(plugin, tmp_path):
    first = worker(plugin)
    _, passes = stand_in.serve(first, asked(), COUNT, most=1)
    first.ngram_corpus.drafter.memory.save(tmp_path / "kept.memory")
    _, later = stand_in.serve(worker(plugin, memory=str(tmp_path / "kept.memory")), asked(), COUNT, most=1)
    assert later < 0.8 * passes


def test_the_algorithm_is_what_ngram_is_to_the_rest_of_sglang(plugin):
    plugin.register("lade")
    algorithm, args = stand_in.REGISTRY["LADE"], stand_in.arguments(device="cpu")
    algorithm.handle_server_args(args)
    assert algorithm.is_ngram() and algorithm.supports_overlap and not algorithm.has_draft_kv()
    assert algorithm.create_future_map("cpu", None) is algorithm
    assert (args.speculative_num_draft_tokens, args.speculative_eagle_topk, args.speculative_num_steps) == (16, 10, 1)
    assert args.disable_overlap_schedule and not args.enable_mixed_chunk and args.max_running_requests == 48
    given = stand_in.arguments(speculative_num_draft_tokens=7, speculative_num_steps=3, max_running_requests=5)
    algorithm.handle_server_args(given)
    assert (given.speculative_num_draft_tokens, given.speculative_num_steps, given.max_running_requests) == (7, 3, 5)
    assert not given.disable_overlap_schedule


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"tp_size": 2}, "tp_size=2, .*give --tp-size 1"),
        ({"pp_size": 2}, "pp_size=2 .*give --tp-size 1"),
        ({"speculative_ngram_external_corpus_path": "x"}, "'x' is NGRAM's"),
        ({"page_size": 16, "attention_backend": "fa3"}, "page_size=16 is not exact .* fa3; give --page-size 1"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(plugin, settings, says):
    plugin.register("lade")
    algorithm, args = stand_in.REGISTRY["LADE"], stand_in.arguments(**settings)
    with pytest.raises(ValueError, match=says):
        algorithm.validate_server_args(args)
        algorithm.handle_server_args(args)


def test_another_version_is_refused(plugin, monkeypatch):
    plugin.register("lade")
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.6.0")
    with pytest.raises(ValueError, match=r"SGLang 0\.6\.0 is not .*pip install 'sglang==0\.5\.23'"):
        stand_in.REGISTRY["LADE"].validate_server_args(stand_in.arguments())


def test_sglang_s_processes_find_the_plug_in_and_import_no_compiled_code():
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"lade": "lade_sglang:register"}
    assert project["dependencies"][-1] == "sglang==0.5.23"
    code = "import sys, types; sys.modules['sglang'] = types.ModuleType('sglang'); import lade_sglang"
    code += "; assert not {'lade.decoding', 'numba', 'transformers'} & sys.modules.keys()"
    path = f"{FOLDER}:{Path(lade.__file__).parents[1]}"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
