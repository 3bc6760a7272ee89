"""Batch-invariant models on a GPU: a token gets the same bits whatever else is in a pass."""
