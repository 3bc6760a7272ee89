"""The integration with transformers: it turns arguments of `generate` into ids, a chooser and stop rules."""
