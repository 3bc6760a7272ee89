"""Tokens per step over a grid of sizes."""
