"""What a checkpoint says about decoding: what the shell keeps of it, and what its own options decide."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

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
