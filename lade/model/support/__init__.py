"""Whether a model can be decoded exactly."""
