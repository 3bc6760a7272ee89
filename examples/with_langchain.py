"""LangChain's HuggingFacePipeline in a chain: python examples/with_langchain.py [MODEL]."""

from __future__ import annotations

from typing import Any

from comparison import DTYPE, MODEL, compare
from langchain_core.prompts import PromptTemplate
from langchain_huggingface import HuggingFacePipeline
from transformers import pipeline

pipe = pipeline("text-generation", model=MODEL, dtype=DTYPE, max_new_tokens=120, do_sample=False)
llm = HuggingFacePipeline(pipeline=pipe)
prompt = PromptTemplate.from_template('def {name}(path, encoding="utf-8"):\n    """{purpose}"""\n    with open(path')


def run(**further: Any) -> str:
    """`bind` is what reaches `generate`; `pipeline_kwargs` of `from_model_id` lose `trust_remote_code`."""
    chain = prompt | llm.bind(pipeline_kwargs=further)
    return "".join(chain.stream({"name": "read_settings", "purpose": "Read a settings file."}))


compare(run)
