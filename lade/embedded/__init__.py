"""The embedded demonstration model."""
