"""The embedded model: how it was trained, how it is measured, and where it lies."""
