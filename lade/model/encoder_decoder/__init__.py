"""Encoder-decoder models: token trees in the decoder, beside what the encoder has made of the input."""
