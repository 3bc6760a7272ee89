"""LangChain, smolagents, lm-eval and Outlines, a scenario each: `make test-frameworks` installs them."""

from __future__ import annotations

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerating import RECIPE, accelerated, counted
from pretend import typed
from transformers import pipeline

from lade.embedded import prompts

ROOT = Path(__file__).parent.parent.parent
GREEDY = {"do_sample": False, "max_new_tokens": 40}
TEMPLATE = "{% for m in messages %}# {{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}# assistant\n"
TASK = """
task: toy
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n\\n"], max_gen_toks: 40, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


def test_langchain_streams_a_prompt(model: Any, tokenizer: Any, text: str) -> None:
    langchain = pytest.importorskip("langchain_huggingface")
    llm = langchain.HuggingFacePipeline(pipeline=pipeline("text-generation", model, tokenizer=tokenizer, **GREEDY))

    def run(**further: Any) -> str:
        return "".join((llm.bind(pipeline_kwargs=further) if further else llm).stream(text))

    assert accelerated(model, run) in llm.invoke(text)


def test_smolagents_runs_the_steps_of_an_agent(folder: str) -> None:
    smolagents = pytest.importorskip("smolagents")
    llm = smolagents.TransformersModel(model_id=folder, torch_dtype="float32", **GREEDY)
    llm.tokenizer.chat_template = TEMPLATE

    def run(**further: Any) -> list[str]:
        before, llm.kwargs = llm.kwargs, {**llm.kwargs, **further}  # an agent's calls use the model's own arguments
        try:
            agent = smolagents.CodeAgent(tools=[], model=llm, max_steps=2, verbosity_level=0)
            agent.prompt_templates["system_prompt"] = "You write Python."
            agent.run("add 2 and 3")
        finally:
            llm.kwargs = before
        return [step.model_output for step in agent.memory.steps if getattr(step, "model_output", None)]

    assert len(accelerated(llm.model, run)) == 2


def test_lm_eval_takes_the_recipe_from_its_command_line(
    model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    import datasets
    from lm_eval._cli import HarnessCLI
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    lines = [json.dumps({"prompt": prompt, "answer": "none"}) + "\n" for prompt in prompts()[:2]]
    (tmp_path / "toy.jsonl").write_text("".join(lines))
    (tmp_path / "toy.yaml").write_text(TASK.format(data=tmp_path / "toy.jsonl"))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def run(gen_kwargs: Any) -> list[Any]:
        evaluated = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=2)  # its criterion needs all rows at once
        options = {"task_manager": tasks, "gen_kwargs": gen_kwargs, "bootstrap_iters": 0}
        found = lm_eval.simple_evaluate(evaluated, tasks=["toy"], **options)
        return [sample["resps"] for sample in found["samples"]["toy"]]

    written = ",".join(f"{name}={value}" for name, value in {**RECIPE, "lookahead": "budget=16"}.items())
    typed(monkeypatch, "lm_eval", "run", "--tasks", "toy", "--gen_kwargs", written)
    with counted(model) as plain:
        expected = run(None)
    with counted(model) as ours:
        assert run(HarnessCLI().parse_args().gen_kwargs) == expected
    assert len(expected) == 2 and 0 < len(ours) < len(plain)


# It compiles a kernel for its masks, and torch's compiler still imports what torch has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_outlines_restricts_several_prompts(model: Any, tokenizer: Any) -> None:
    outlines = pytest.importorskip("outlines")
    generator = outlines.from_transformers(model, tokenizer)
    pattern = outlines.regex(r"def [a-z_]{3,12}\([a-z]{0,9}\):\n(    [a-z]{2,9} = [a-z]{2,9}\n){3,9}")
    run = functools.partial(generator.batch, prompts()[:2], pattern, **GREEDY)  # its processor needs all rows
    assert all(answer.startswith("def ") for answer in accelerated(generator.model, run))


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore", "error::lade.errors.FallbackWarning")
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("with_*.py")), ids=lambda path: path.stem)
def test_an_example_prints_that_the_text_is_plains(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = path.read_text(encoding="utf-8").replace("120", "30")
    for module in re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE):
        if module != "comparison":
            pytest.importorskip(module)
    typed(monkeypatch, str(path))
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.delitem(sys.modules, "comparison", raising=False)
    exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
    assert "The text is the same as that of plain generate." in capsys.readouterr().out
