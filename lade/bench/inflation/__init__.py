"""Larger models that compute the same function."""
