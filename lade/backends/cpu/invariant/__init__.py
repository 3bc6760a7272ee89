"""Batch-invariant models: a row rounds alike whatever else is in a pass."""
