"""Runs methods side by side on the same prompts."""
