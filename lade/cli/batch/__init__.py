"""Batch commands: one runner, two formats (files of prompts, and OpenAI batch files)."""
