"""CPU backend: packed linear layers, batch-invariant models, and the compiled kernels of both."""
