"""Prompts with images, videos or audio."""
