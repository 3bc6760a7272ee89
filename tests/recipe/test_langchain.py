"""LangChain's `HuggingFacePipeline`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from accelerating import Way, accelerated
from transformers import pipeline

from lade.embedded.files import prompts

langchain_huggingface = pytest.importorskip("langchain_huggingface")


@pytest.fixture
def llm(model: Any, tokenizer: Any) -> Any:
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, do_sample=False, max_new_tokens=40)
    return langchain_huggingface.HuggingFacePipeline(pipeline=pipe)


def bound(llm: Any, arguments: dict[str, Any]) -> Any:
    return llm.bind(pipeline_kwargs=arguments) if arguments else llm


def test_a_prompt(llm: Any, way: Way, text: str) -> None:
    accelerated(way, llm.pipeline.model, lambda **further: bound(llm, further).invoke(text))


def test_several_prompts(llm: Any, way: Way) -> None:
    accelerated(way, llm.pipeline.model, lambda **further: bound(llm, further).batch(prompts()[:2]))


def test_a_text_as_it_comes(llm: Any, way: Way, text: str) -> None:
    def run(**further: Any) -> str:
        return "".join(bound(llm, further).stream(text))

    assert accelerated(way, llm.pipeline.model, run) in llm.invoke(text)


def test_a_chain(llm: Any, way: Way) -> None:
    prompt = pytest.importorskip("langchain_core.prompts").PromptTemplate.from_template("def {name}(path):\n    ")
    run = functools.partial(dict, name="read_lines")
    accelerated(way, llm.pipeline.model, lambda **further: (prompt | bound(llm, further)).invoke(run()))
