"""Beam search: one token tree for all beams of a prompt."""
