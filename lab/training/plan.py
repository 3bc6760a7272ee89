"""Training schedule: token budget, row lengths and learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig

from lade.errors import InputError
from training.tokens import BOS_ID, EOS_ID, PAD_ID


@dataclass(frozen=True)
class TrainPlan:
    """A warmup-stable-decay schedule counted in tokens.

    The last `long_share` of the tokens comes in rows of `long_tokens`, the others in short rows; the learning rate
    falls during the last `decay_share`; during the last `loop_share` every batch has looping rows beside it (loops.py).
    Nothing before these depends on the total, so that it may still be changed when a run is resumed.

    Raises InputError for a count below one or a share outside 0 to 1.
    """

    total_tokens: int = 21_700_000
    batch_tokens: int = 4096
    short_tokens: int = 256
    long_tokens: int = 1024
    long_share: float = 0.12
    decay_share: float = 0.25
    loop_share: float = 0.34
    loop_weight: float = 0.8
    warmup_tokens: int = 400_000
    matrix_lr: float = 5e-3
    vector_lr: float = 8e-3
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        for field in ("total_tokens", "batch_tokens", "short_tokens", "long_tokens", "warmup_tokens"):
            if getattr(self, field) < 1:
                raise InputError(f"{field}={getattr(self, field)}: must be at least 1")
        for field in ("long_share", "decay_share", "loop_share"):
            if not 0 <= getattr(self, field) <= 1:
                raise InputError(f"{field}={getattr(self, field)}: must lie between 0 and 1")
        if self.batch_tokens % self.long_tokens or self.batch_tokens % self.short_tokens:
            rows = f"rows of {self.short_tokens} and {self.long_tokens}"
            raise InputError(f"batch_tokens={self.batch_tokens}: must be a multiple of {rows}")

    def rate(self, tokens: int) -> float:
        """Return the share of the full learning rate after `tokens` tokens: up, level, and down to almost zero."""
        warmup = (tokens + self.batch_tokens) / self.warmup_tokens
        left = max(self.total_tokens - tokens, 0) / (self.total_tokens * self.decay_share or 1)
        return min(1.0, warmup, max(left, 0.0))

    @property
    def tail_share(self) -> float:
        """The last share of the run, in which what happens depends on the total."""
        return max(self.long_share, self.decay_share, self.loop_share)

    def in_tail(self, tokens: int) -> bool:
        """Say whether the tail has begun after `tokens` tokens."""
        return tokens >= self.total_tokens * (1 - self.tail_share)

    def breaks_loops(self, tokens: int) -> bool:
        """Say whether looping rows are read beside the text after `tokens` tokens."""
        return tokens >= self.total_tokens * (1 - self.loop_share)

    def row_tokens(self, tokens: int) -> int:
        """Return the length of the rows read after `tokens` tokens."""
        return self.long_tokens if tokens >= self.total_tokens * (1 - self.long_share) else self.short_tokens


@dataclass(frozen=True)
class Shape:
    """The size of the model."""

    vocab_tokens: int = 4096
    hidden: int = 192
    intermediate: int = 512
    layers: int = 6
    heads: int = 6
    kv_heads: int = 3
    context_tokens: int = 1024

    def config(self) -> LlamaConfig:
        """Return the configuration of a Llama of this size, embeddings tied."""
        return LlamaConfig(
            vocab_size=self.vocab_tokens,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=self.context_tokens,
            tie_word_embeddings=True,
            initializer_range=0.02,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )
