"""Beam search with one token tree for all beams of a prompt."""
