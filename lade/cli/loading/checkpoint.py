"""Generation defaults of a checkpoint, and checks of its config files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import GenerationConfig

from lade.cli.loading.generation_config import ALWAYS, BEAMS, SAMPLING, InvalidField, find_invalid
from lade.cli.options.decoding import Choices
from lade.errors import InputError

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAM_FIELDS = ("early_stopping", "length_penalty")
_DECIDED_BY_THE_SHELL = frozenset(
    [
        *SAMPLING_FIELDS,
        *BEAM_FIELDS,
        "do_sample",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "diversity_penalty",
        "penalty_alpha",
        "dola_layers",
        "max_length",
        "max_new_tokens",
        "max_time",
        "stop_strings",
        "prompt_lookup_num_tokens",
        "use_mtp",
        "use_cache",
        "cache_implementation",
        "cache_config",
        "return_dict_in_generate",
        "output_scores",
        "output_logits",
        "output_attentions",
        "output_hidden_states",
    ]
)
"""Fields of a checkpoint's generation_config that the shell's options replace."""


def sampling_defaults(config: GenerationConfig) -> dict[str, Any]:
    """Return the checkpoint's settings of sampling and beam search."""
    values = {name: getattr(config, name, None) for name in ("do_sample", *SAMPLING_FIELDS, *BEAM_FIELDS)}
    return {name: value for name, value in values.items() if value is not None}


def greedy(config: GenerationConfig) -> GenerationConfig:
    """Return a greedy copy of a checkpoint's generation_config that keeps its stop tokens and penalties."""
    kept = {key: value for key, value in config.to_dict().items() if key not in _DECIDED_BY_THE_SHELL}
    return GenerationConfig.from_dict({**kept, "do_sample": False, "num_beams": 1})


CONFIG, GENERATION = "config.json", "generation_config.json"


def check(model: Any, name: str, source: str) -> None:
    """Raise `InputError` if a field of the generation_config keeps a loaded model from generating.

    Args:
        model: transformers causal language model.
        name: name of the model as the user gave it.
        source: folder of the model, or its hub id.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    wrong = find_invalid(model.generation_config.to_dict(), ALWAYS, vocabulary=vocabulary)
    if wrong:  # old checkpoints have generation settings in config.json
        raise InputError(_line(name, GENERATION if wrong.field in _values(source, GENERATION) else CONFIG, wrong))


def check_choices(values: Mapping[str, Any], name: str) -> None:
    """Raise `InputError` for a sampling or beam setting of a checkpoint that is used and out of range.

    Args:
        values: settings in use, by their field names.
        name: name of the model as the user gave it.
    """
    wrong = find_invalid(values, SAMPLING if values.get("do_sample") else {}, BEAMS)
    if wrong:
        named = wrong.field in {field.name for field in fields(Choices)}
        option = f", there or with --{wrong.field.replace('_', '-')}" if named else ""
        raise InputError(_line(name, GENERATION, wrong) + option)


def _line(name: str, file: str, wrong: InvalidField) -> str:
    return f"model {name!r}: its {file} has {wrong}"


def _values(source: str, file: str) -> dict[str, Any]:
    """Return the fields of a JSON file; empty if it does not exist or cannot be read."""
    path: Any = Path(source) / file
    if not path.is_file():
        path = None if Path(source).exists() else try_to_load_from_cache(source, file)
    if not isinstance(path, str | Path):
        return {}
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
