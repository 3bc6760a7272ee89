"""What the step cost of a model depends on: hardware, weights, settings and versions, by readable names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

import torch
import transformers
from transformers import PreTrainedModel

from lade.model.config import field
from lade.model.facts import ModelFacts, bytes_by_kind
from lade.model.inputs import batch_bucket
from lade.model.runner import EagerRunner
from lade.native import processor_name
from lade.version import __version__

_SHAPE = """
    model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size
    """.split()  # noqa: SIM905 - a table of words reads better without the quotes


def key_of(model: PreTrainedModel, runner: EagerRunner, batch: int = 1) -> dict[str, object]:
    """All that a step's cost depends on, but for the length of the text and the machine's other load.

    These two change from step to step: the curve follows them while it is used.
    """
    facts = runner.facts
    config = facts.text_config
    return {
        "devices": _names(weight.device for weight in facts.weights),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),  # which can be limited from outside
        "model": type(model).__name__,
        "shape": {name: field(config, name) for name in _SHAPE},
        "parameters": sum(weight.numel() for weight in facts.weights),
        # These two tell packed, quantised and adapted weights from plain ones: they sit in modules of other classes,
        # or are tensors of other classes, or other numbers of bytes.
        "modules": _counts(facts),
        "weights": bytes_by_kind(facts.weights),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": config._attn_implementation,
        "runner": type(runner).__name__,
        "batch": batch_bucket(batch),
        **({"processes": runner.processes} if runner.processes > 1 else {}),
        "lade": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def devices_of(model: PreTrainedModel) -> list[str]:
    """Names of the hardware that a model's weights lie on, one for each device."""
    return _names(parameter.device for parameter in model.parameters())


def _names(devices: Iterable[torch.device]) -> list[str]:
    return sorted(map(_device_name, set(devices))) or ["none"]


def _counts(facts: ModelFacts) -> dict[str, int]:
    """Modules by the name of their class."""
    counts = Counter[str]()
    for kind, modules in facts.kinds.items():
        counts[kind.__name__] += len(modules)
    return dict(counts)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {os.cpu_count()} cores" if device.type == "cpu" else device.type
