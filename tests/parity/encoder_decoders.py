"""Tiny encoder-decoder models with random weights, one factory for every architecture that the tests cover.

With weights that are all drawn alike a decoder repeats one token for ever. So here the encoder's part is made smaller,
and that of the positions and of self-attention larger: texts wander and loop, and a wrong position changes them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from families import VOCABULARY, randomize
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

START, PAD, END = 2, 0, 3
POSITIONS = 160
_BART = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
}  # fmt: skip
_T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 3,
    "num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "tie_word_embeddings": False,
}  # fmt: skip
_GAINS_OF_BART = {
    "*coder.embed_tokens": 0.5, "shared": 0.5,  # the same, where they are tied
    "decoder.embed_positions": 3.0, "decoder.layers.*.encoder_attn.out_proj": 0.3,
    "decoder.layers.*.self_attn.[qk]_proj": 2.0,
}  # fmt: skip
_GAINS_OF_T5 = {
    "*coder.embed_tokens": 0.3, "shared": 0.3, "decoder.*.SelfAttention.o": 6.0,
    "decoder.*.relative_attention_bias": 8.0,
}  # fmt: skip


@dataclass(frozen=True)
class EncoderDecoder:
    """One architecture in one shape.

    Attributes:
        model_type: as in `config.json`.
        sizes: fields of its config.
        name: of the test; the model type unless one type is tried in several shapes.
        seed: of weights that write a lively text.
    """

    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    seed: int = 1

    def __str__(self) -> str:
        return self.name or self.model_type

    def build(
        self, backend: str = "sdpa", seed: int | None = None, *, end: int | None = None, **overrides: Any
    ) -> PreTrainedModel:
        """A model in evaluation mode, in float64, its weights drawn from `seed`.

        Args:
            backend: attention implementation.
            seed: of the weights; its own one by default.
            end: the id that ends a text; None for none.
            overrides: fields of the config.
        """
        ids = {"decoder_start_token_id": START, "pad_token_id": PAD, "eos_token_id": end, "bos_token_id": None}
        fields = copy.deepcopy({**self.sizes, **ids, "forced_eos_token_id": None, **overrides})
        config = AutoConfig.for_model(self.model_type, **fields)
        model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation=backend)
        model.generation_config = GenerationConfig(**ids)
        return _with_gains(
            randomize(model, self.seed if seed is None else seed),
            _GAINS_OF_T5 if "t5" in self.model_type else _GAINS_OF_BART,
        )


@torch.no_grad()
def _with_gains(model: PreTrainedModel, gains: dict[str, float]) -> PreTrainedModel:
    """Multiply the parameters of modules with these names."""
    for name, parameter in model.named_parameters():
        for pattern, gain in gains.items():
            if fnmatch(name.removeprefix("model."), f"{pattern}.weight"):
                parameter.mul_(gain)
    return model.double().eval()


USUAL = [EncoderDecoder("bart", _BART), EncoderDecoder("t5", _T5), EncoderDecoder("marian", _BART)]
OTHERS = [
    EncoderDecoder("mbart", {**_BART, "scale_embedding": True}),
    EncoderDecoder("pegasus", _BART),
    EncoderDecoder("blenderbot", _BART),
    EncoderDecoder("m2m_100", _BART, seed=32),
    EncoderDecoder("mt5", {**_T5, "feed_forward_proj": "gated-gelu"}),
    EncoderDecoder("umt5", _T5),
    EncoderDecoder("marian", {**_BART, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 50},
        "marian-own-vocabulary"),
]  # fmt: skip
LISTED = USUAL + OTHERS
CHECKED = [
    EncoderDecoder("blenderbot-small", _BART),
    EncoderDecoder("longt5", {**_T5, "local_radius": 4, "global_block_size": 4}),
    EncoderDecoder("plbart", _BART),
    EncoderDecoder("mvp", _BART),
    EncoderDecoder("bigbird_pegasus", {**_BART, "attention_type": "original_full"}),
]
FAILING = EncoderDecoder(
    "led",
    {**_BART, "attention_window": [16, 16]}
    | {f"max_{part}_position_embeddings": POSITIONS for part in ("encoder", "decoder")},
)


def article(length: int, seed: int = 0) -> torch.Tensor:
    """An encoder's input, `[1, length]`, without the special ids, in which pieces come again."""
    generator = torch.Generator().manual_seed(2000 + seed)
    return torch.randint(END + 1, 50, (1, length), generator=generator)


def whisper(seed: int = 0, backend: str = "sdpa") -> Any:
    """A tiny Whisper of 40 frames a segment; its texts end with 50, and ids from 54 on are timestamps."""
    sizes = {name: value for name, value in _BART.items() if name != "max_position_embeddings"}
    lengths = {"max_target_positions": 96, "max_source_positions": 20, "num_mel_bins": 8}
    ids = {"decoder_start_token_id": START} | {f"{kind}_token_id": 50 for kind in ("bos", "eos", "pad")}
    config = WhisperConfig(**sizes, **lengths, **ids, suppress_tokens=None, begin_suppress_tokens=None)
    model = WhisperForConditionalGeneration._from_config(config, attn_implementation=backend)
    model.generation_config = GenerationConfig(**ids, max_length=60)
    model.generation_config.no_timestamps_token_id, model.generation_config.is_multilingual = 53, False
    return _with_gains(randomize(model, seed), _GAINS_OF_BART)


def sound(frames: int, rows: int = 1) -> torch.Tensor:
    """Features of noise, `[rows, 8, frames]`."""
    return torch.randn(rows, 8, frames, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
