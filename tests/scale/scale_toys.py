"""A tiny model with random weights in a folder, for processes that load it."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 512
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def saved(path: Path) -> tuple[Path, LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The folder, and what is in it; in float64."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(["</s>", *alphabet])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", clean_up_tokenization_spaces=False)
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        tie_word_embeddings=False, initializer_range=0.4, **sizes,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    letters = tokenizer("abcdefghijklmnopqrstuvwxyz ,.")["input_ids"]
    model.lm_head.weight.data *= torch.zeros(len(tokenizer), 1).index_fill(0, torch.tensor(letters), 1.0)
    tokenizer.save_pretrained(path)
    model.save_pretrained(path)
    torch.nn.Module.to(model, torch.float64)
    return path, model.eval(), tokenizer
