"""smolagents' `TransformersModel`, alone and in an agent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerating import Way, accelerated, counted

from lade.recipe.export import export_recipe

smolagents = pytest.importorskip("smolagents")

TEMPLATE = (
    "{% for m in messages %}# {{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant\n{% endif %}"
)


def made(folder: str | Path, **arguments: Any) -> Any:
    model = smolagents.TransformersModel(
        model_id=str(folder), torch_dtype="float32", max_new_tokens=40, do_sample=False, **arguments
    )
    model.tokenizer.chat_template = TEMPLATE
    return model


@pytest.fixture(scope="module")
def llm(folder: str) -> Any:
    return made(folder)


@pytest.fixture
def messages(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def with_arguments(llm: Any, call: Callable[[], Any]) -> Callable[..., Any]:
    """`call`, while the model's own arguments, which an agent's calls use, have further ones."""

    def run(**further: Any) -> Any:
        before = dict(llm.kwargs)
        llm.kwargs.update(further)
        try:
            return call()
        finally:
            llm.kwargs = before

    return run


@pytest.mark.parametrize("stop", [None, ["return"]])
def test_an_answer(llm: Any, way: Way, messages: Any, stop: list[str] | None) -> None:
    run = with_arguments(llm, lambda: llm.generate(messages, stop_sequences=stop).content)
    assert accelerated(way, llm.model, run)


def test_an_answer_as_it_comes(llm: Any, way: Way, messages: Any) -> None:
    run = with_arguments(llm, lambda: [delta.content for delta in llm.generate_stream(messages)])
    assert "".join(accelerated(way, llm.model, lambda **further: ["".join(run(**further))]))


def test_an_agents_steps(llm: Any, way: Way) -> None:
    def call() -> list[str]:
        agent = smolagents.CodeAgent(tools=[], model=llm, max_steps=2, verbosity_level=0)
        agent.prompt_templates["system_prompt"] = "You write Python."
        agent.run("add 2 and 3")
        return [step.model_output for step in agent.memory.steps if getattr(step, "model_output", None)]

    assert len(accelerated(way, llm.model, with_arguments(llm, call))) == 2


def test_a_model_whose_folder_holds_the_recipe(llm: Any, folder: str, messages: Any, tmp_path: Path) -> None:
    """The only way that needs no argument of `generate`."""
    shutil.copytree(folder, tmp_path / "model")
    export_recipe(tmp_path / "model", force=True)
    ours = made(tmp_path / "model", trust_remote_code=True, lookahead="window=7;ngram=5;guesses=7")
    with counted(llm.model) as plain, counted(ours.model) as accelerated_passes:
        assert ours.generate(messages).content == llm.generate(messages).content
    assert 0 < accelerated_passes.passes < plain.passes
