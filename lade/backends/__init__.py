"""Backends: model families, layers and devices beyond the core, loaded on demand through `lade.model.registry`."""
