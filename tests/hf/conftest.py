"""A tokenizer for the toy models."""

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast


@pytest.fixture
def letters():
    """Every id of a toy model is written as two letters."""
    vocabulary = {chr(97 + i // 26) + chr(97 + i % 26): i for i in range(48)} | {"abcdef": 48}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="aa"))
    backend.pre_tokenizer, backend.decoder = WhitespaceSplit(), Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="aa", eos_token="bv")
