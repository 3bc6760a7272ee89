"""Prepacked and int8 linear layers for the CPU."""
