"""Encoder-decoder models: token trees in the decoder, with the encoder's output computed once."""
