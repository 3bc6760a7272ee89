"""Checks that a model can be decoded exactly."""
