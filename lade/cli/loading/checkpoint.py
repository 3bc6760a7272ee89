"""Validation of a checkpoint's config files, and its generation defaults."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import GenerationConfig

from lade.cli.options.decoding import Choices
from lade.errors import InputError
from lade.hf.generation_config import ALWAYS, BEAMS, LOADING, SAMPLING, InvalidField, find_invalid, is_whole

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
"""Fields of a checkpoint's generation_config that would make it anything else than greedy decoding of one text."""


def sampling_defaults(config: GenerationConfig) -> dict[str, Any]:
    """What a checkpoint has set of sampling and beams, for those who ask for either."""
    values = {name: getattr(config, name, None) for name in ("do_sample", *SAMPLING_FIELDS, *BEAM_FIELDS)}
    return {name: value for name, value in values.items() if value is not None}


def greedy(config: GenerationConfig) -> GenerationConfig:
    """A checkpoint's generation_config, its stop tokens and penalties kept, made greedy without a word of warning."""
    kept = {key: value for key, value in config.to_dict().items() if key not in _DECIDED_BY_THE_SHELL}
    return GenerationConfig.from_dict({**kept, "do_sample": False, "num_beams": 1})


CONFIG, GENERATION = "config.json", "generation_config.json"
_SIZES = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    n_embd n_head n_layer
""".split()  # noqa: SIM905 - a table of words reads better without the quotes
_OBJECTS = ("quantization_config", "rope_parameters", "rope_scaling")


def check(model: Any, name: str, source: str) -> None:
    """Raise `InputError` for a loaded model that could not generate, because of a field of its files.

    Args:
        model: a transformers causal language model.
        name: as the user gave it.
        source: its folder, or its id on the hub.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    wrong = find_invalid(model.generation_config.to_dict(), ALWAYS, vocabulary=vocabulary)
    if wrong:  # old checkpoints say in their config.json how to generate
        raise InputError(_line(name, GENERATION if wrong.field in _values(source, GENERATION) else CONFIG, wrong))
    wrong = _nonsense_in_a_decoder(model)
    if wrong:
        raise InputError(_line(name, CONFIG, wrong))


def check_choices(values: Mapping[str, Any], name: str) -> None:
    """Raise `InputError` for what a checkpoint's generation_config says of sampling or beams, where it is used.

    Args:
        values: by the names of the fields: those in use.
        name: of the model, as the user gave it.
    """
    wrong = find_invalid(values, SAMPLING if values.get("do_sample") else {}, BEAMS)
    if wrong:
        named = wrong.field in {field.name for field in fields(Choices)}
        option = f", there or with --{wrong.field.replace('_', '-')}" if named else ""
        raise InputError(_line(name, GENERATION, wrong) + option)


def why_not_loaded(source: str, problem: Exception) -> str:
    """What in a checkpoint's files has kept it from being loaded; empty where that is not known.

    Args:
        source: its folder, or its id on the hub.
        problem: what was raised.
    """
    if "ignore_mismatched_sizes" in str(problem):
        return f"the sizes in its {CONFIG} are not those of its weights: give the {CONFIG} that was saved with them"
    generation, config = (_values(source, file) for file in (GENERATION, CONFIG))
    wrong, file = find_invalid(generation, ALWAYS, LOADING), GENERATION
    if not wrong:
        wrong, file = _nonsense_in_config(config, problem), CONFIG
    return f"its {file} has {wrong}" if wrong else ""


def _line(name: str, file: str, wrong: InvalidField) -> str:
    return f"model {name!r}: its {file} has {wrong}"


def _values(source: str, file: str) -> dict[str, Any]:
    """What a file holds; nothing if it is not there, or cannot be read, which then is the problem itself."""
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


def _nonsense_in_a_decoder(model: Any) -> InvalidField | None:
    config = model.config
    if config.is_encoder_decoder:
        remedy = f"set it to false, as {type(model).__name__} has no encoder"
        return InvalidField("is_encoder_decoder", config.is_encoder_decoder, remedy)
    if getattr(config, "return_dict", True) is False:
        return InvalidField("return_dict", False, "leave it out: generation needs the names of the outputs")
    window = getattr(config.get_text_config(decoder=True), "sliding_window", None)
    if window is not None and not is_whole(window):
        return InvalidField("sliding_window", window, "give a whole number, or null for no window")
    return None


def _nonsense_in_config(config: dict[str, Any], problem: Exception) -> InvalidField | None:
    """What in a config that was not loaded may be the reason."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    suspects = (wrong for part in parts for wrong in (*_out_of_range(part), *_named_by(problem, part)))
    return next(suspects, None)


def _out_of_range(config: dict[str, Any]) -> Iterator[InvalidField]:
    for field, (fits, remedy) in _CONFIG_FIELDS.items():
        value = config.get(field)
        if value is not None and not fits(value):
            yield InvalidField(field, value, remedy)
    padding, vocabulary = config.get("pad_token_id"), config.get("vocab_size")
    if is_whole(vocabulary, 1) and is_whole(padding, vocabulary or 0):
        yield InvalidField("pad_token_id", padding, f"give an id below vocab_size, which is {vocabulary}, or null")


def _named_by(problem: Exception, config: dict[str, Any]) -> Iterator[InvalidField]:
    """Fields that an error of transformers is about."""
    looked_up = problem.args if isinstance(problem, KeyError) else ()
    for field, value in config.items():
        if isinstance(value, str) and value in looked_up:
            yield InvalidField(field, value, "give a name that transformers knows")
        elif f"Field '{field}' " in str(problem):
            yield InvalidField(field, value, _type_wanted(str(problem)))


def _type_wanted(message: str) -> str:
    """The remedy in a message such as "Field 'use_cache' expected bool, got str (value: 'x')"."""
    wanted = message.rpartition(" expected ")[2].partition(",")[0]
    return (
        f"give a value of type {wanted}" if " expected " in message else "give a value of the type that its class has"
    )


def _is_dtype(value: object) -> bool:
    return value == "auto" or (isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype))


def _is_size(value: object) -> bool:
    return isinstance(value, list) or is_whole(value, 1)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


_CONFIG_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_SIZES, (_is_size, "give a whole number >= 1")),
    **dict.fromkeys(_OBJECTS, (_is_object, "give an object, or leave it out")),
    **dict.fromkeys(("dtype", "torch_dtype"), (_is_dtype, "give float32, bfloat16 or float16")),
}
"""Fields of a config.json that was not loaded: what fits, and what to give instead."""
