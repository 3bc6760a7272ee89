"""Batch-invariant models: a row gets the same bits whatever else is in a pass."""
