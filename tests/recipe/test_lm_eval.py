"""lm-eval: `--gen_kwargs custom_generate=DIR,trust_remote_code=True`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from accelerating import RECIPE, counted

from lade.embedded.files import prompts

lm_eval = pytest.importorskip("lm_eval")

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
WRITTEN = ",".join(f"{name}={value}" for name, value in RECIPE.items())
IN_JSON = {**RECIPE, "lookahead": {"window": 7, "ngram": 5, "guesses": 7}}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A task of two prompts; nothing of it stays in the user's cache folder."""
    import datasets
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"prompt": prompt, "answer": "none"}) + "\n" for prompt in prompts()[:2]]
    (folder / "toy.jsonl").write_text("".join(lines))
    (folder / "toy.yaml").write_text(TASK.format(data=folder / "toy.jsonl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture
def answers(tasks: Any, model: Any, tokenizer: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    def run(gen_kwargs: str | dict[str, Any] | None, batch_size: int = 1) -> list[Any]:
        evaluated = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        found = lm_eval.simple_evaluate(
            evaluated, tasks=["toy"], task_manager=tasks, gen_kwargs=gen_kwargs, bootstrap_iters=0
        )
        return [sample["resps"] for sample in found["samples"]["toy"]]

    return run


@pytest.mark.parametrize(
    "gen_kwargs",
    [f"{WRITTEN},lookahead=budget=16", f"{WRITTEN},lookahead=window=7;ngram=5;guesses=7", json.dumps(IN_JSON)],
    ids=["budget", "sizes", "json"],
)
def test_the_answers_are_those_of_plain_decoding(
    answers: Any, model: Any, gen_kwargs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval._cli import HarnessCLI

    monkeypatch.setattr("sys.argv", ["lm_eval", "run", "--tasks", "toy", "--gen_kwargs", gen_kwargs])
    with counted(model) as plain:
        expected = answers(None)
    with counted(model) as ours:
        assert answers(HarnessCLI().parse_args().gen_kwargs) == expected
    assert len(expected) == 2 and ours.passes < plain.passes


def test_batches_go_in_lock_step(answers: Any, model: Any) -> None:
    """Its criterion counts on all rows at once."""
    with counted(model) as plain:
        expected = answers(None, batch_size=2)
    with counted(model) as ours:
        assert answers(f"{WRITTEN},lookahead=budget=16", batch_size=2) == expected
    assert 0 < ours.passes < plain.passes
