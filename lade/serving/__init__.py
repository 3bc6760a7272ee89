"""Continuous batching in one process: requests come and go while others are decoded."""
