"""The integration with transformers: turns the arguments of `generate` into ids, a chooser and stop rules."""
