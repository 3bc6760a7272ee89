"""The examples of all docstrings run, and say what they show; on the embedded model instead of one from a hub."""

import doctest
import gzip
import importlib
import json
import pkgutil
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import lade
from lade.embedded import model_path
from lade.model.runner import EagerRunner
from lade.model.supports import supports

ROOT = Path(__file__).parent.parent
NEEDS_TRITON = {f"lade.backends.tree_attention.{module}" for module in ("kernel", "launch")} | {
    f"lade.backends.cuda_graphs.{module}"
    for module in ("fused_kernels", "invariant.attention", "invariant.kernel", "invariant.layers")
}
NEEDS_OTEL = "lade.server.tracing"
SMALLER = {
    "500e6": "5e6",
    "limit=5": "limit=1",
    "vocabulary=32000": "vocabulary=4096",
    "max_new_tokens=200": "max_new_tokens=20",
    '"plain", "adaptive"])': '"plain"], lade.bench.Settings(max_new_tokens=4))',
}
"""What would take long, and what a test runs instead."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Shown(doctest.OutputChecker):
    """Compares what an example shows; most show nothing of what they return. Figures depend on model and machine."""

    def check_output(self, want, got, optionflags):
        figures = re.fullmatch(r"\d+\.\d+\n", want) and re.fullmatch(r"\d+\.\d+\n", got)
        return not want or bool(figures) or super().check_output(want, got, optionflags)


def examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for found in pkgutil.walk_packages(lade.__path__, "lade."):
        if found.name in (*NEEDS_TRITON, NEEDS_OTEL) or found.name.endswith("__main__"):
            continue
        module = importlib.import_module(found.name)
        yield from (test for test in finder.find(module, found.name, module=module) if test.examples)
    yield from (test for test in finder.find(lade, "lade", module=lade) if test.name == "lade" and test.examples)


EXAMPLES = {test.name: test for test in examples()}
assert {"lade.hf.generate.generate", "lade.testing", "lade.config.LookaheadConfig"} <= EXAMPLES.keys()


@pytest.fixture(scope="module")
def loaded():
    model = AutoModelForCausalLM.from_pretrained(model_path(), dtype=torch.float32)
    model.generation_config.max_new_tokens = 12  # for examples that leave it to the model
    return model, AutoTokenizer.from_pretrained(model_path())


@pytest.fixture
def names(loaded, tmp_path, monkeypatch):
    """What examples take as given, in a folder that has the files they name."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer = loaded
    with gzip.open("HumanEval.jsonl.gz", "wt") as file:
        for number in range(20):
            problem = {"task_id": f"HumanEval/{number}", "prompt": "def one():\n", "entry_point": "one", "test": ""}
            file.write(json.dumps(problem) + "\n")
    for name in ("before.json", "after.json"):
        shutil.copy(ROOT / "benchmarks" / "embedded-code" / "results.json", name)
    inputs = tokenizer("def fibonacci(n):", return_tensors="pt", return_token_type_ids=False)
    given = {"lade": lade, "torch": torch, "transformers": transformers, "name": model_path()}
    given |= {name: getattr(transformers, name) for name in ("AutoModelForCausalLM", "TextStreamer")}
    given |= {"model": model, "small": model, "tokenizer": tokenizer, "inputs": inputs, "ids": inputs["input_ids"]}
    given |= {"memory": lade.Memory(), "steps": iter([lade.Step]), "prompts": [inputs["input_ids"]]}
    given["runner"] = EagerRunner(model, supports(model).require(), GenerationConfig(max_length=200))
    with lade.Engine(model) as engine:
        yield given | {"engine": engine}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs(name, names, capsys):
    test = EXAMPLES[name]
    test.globs = {**test.globs, **names}
    for example in test.examples:
        for large, small in SMALLER.items():
            example.source = example.source.replace(large, small)
    runner, report = doctest.DocTestRunner(Shown(), optionflags=FLAGS), []
    runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)
