"""The algorithm: token ids and tensors only. Nothing here knows of text, tokenizers or Hugging Face configs.

Letters, as in the paper and everywhere in this package:

    W  window columns          S  tokens in a step          V  vocabulary
    N  n-gram length           P  cached tokens of a row    B  rows of a batch
    G  guesses per step        A  tokens accepted in a step
"""
