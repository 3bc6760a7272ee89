"""An agent of smolagents: python examples/with_smolagents.py [MODEL]."""

from __future__ import annotations

from typing import Any

from comparison import DTYPE, MODEL, compare
from smolagents import CodeAgent, TransformersModel

model = TransformersModel(model_id=MODEL, torch_dtype=DTYPE, max_new_tokens=120, do_sample=False)
if not model.tokenizer.chat_template:  # the embedded model was never taught to chat, and will not do what it is asked
    model.tokenizer.chat_template = "{% for m in messages if m['role'] == 'user' %}# {{ m['content'] }}\n{% endfor %}"


def run(**further: Any) -> str:
    """The model's `kwargs` go to `generate` with every call that the agent makes."""
    before, model.kwargs = model.kwargs, {**model.kwargs, **further}
    agent = CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=0)
    agent.run("Which numbers below 100 are prime?")
    model.kwargs = before
    return "\n".join(step.model_output for step in agent.memory.steps if getattr(step, "model_output", None))


compare(run)
