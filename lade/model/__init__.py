"""The tensor side: supported models, attention masks, the KV cache, and running the model.

facts.py             ModelFacts: one survey of the model per call
supports.py          lade.supports: the models that can be decoded exactly
prepared.py          Prepared: the inputs of a generation, from `model.generate`
runner.py            EagerRunner: prefill, and one forward pass over a token tree per step
prefill.py           passes over prompts, and logits of the prompt tokens
kv_cache.py          TreeCache: rows of different lengths, compacted to accepted paths
cache_layers.py      its layers
inputs.py            input tensors and attention masks of a step
config.py            configuration fields, position limits
capture_blockers.py  hooks, wrappers and adapters that prevent inference mode or graph capture
module_changes.py    hooks, overrides and classes that a module has for a while
randomness.py        random numbers of one thread, apart from those of the process
registry.py          the table of backends, and their roles
"""
