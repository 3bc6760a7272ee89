"""Backends: what serves a kind of model, layer or device beyond the core; each folder is found through one table."""
