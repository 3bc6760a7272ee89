"""Forward passes captured as CUDA graphs, with static caches."""
